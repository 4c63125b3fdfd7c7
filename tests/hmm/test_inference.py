"""Every recursion equals brute force over all paths and texts; padding changes nothing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from foretrace.hmm import HMM, inference
from foretrace.hmm.inference import IMPOSSIBLE
from tiny import (
    FORMS,
    LENGTH,
    TOKENS,
    all_texts,
    path_probabilities,
    simplex,
    sparse_emission,
    state_marginals,
    tiny_hmm,
)


def assert_exact(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
def test_likelihood_equals_enumeration(form: str) -> None:
    hmm, texts = tiny_hmm(form), all_texts(LENGTH)
    _, joint = path_probabilities(hmm, texts)
    possible = joint.sum(0) > 0
    found = hmm.log_likelihood(texts).exp()
    assert_exact(found[possible], joint.sum(0)[possible])
    assert float(joint.sum()) == pytest.approx(1, abs=1e-12)  # the enumeration itself is whole


@pytest.mark.parametrize("form", FORMS)
def test_filter_equals_enumeration(form: str) -> None:
    hmm, texts = tiny_hmm(form), all_texts(LENGTH)
    likely = path_probabilities(hmm, texts)[1].sum(0) > 0
    texts = texts[likely]
    filtered = hmm.filter(texts)
    total = torch.zeros(len(texts), dtype=torch.float64)
    for t in range(LENGTH):
        marginal = state_marginals(hmm, texts[:, : t + 1], t)  # p(z_t, x up to t)
        belief = marginal / marginal.sum(-1, keepdim=True)
        assert_exact(filtered.belief[:, t], belief)
        total += filtered.log_probability[:, t]
        assert_exact(total.exp(), marginal.sum(-1))
        # p(z_t+1, x up to t): sum the next token out
        ahead = torch.zeros_like(marginal)
        for token in range(TOKENS):
            longer = torch.cat([texts[:, : t + 1], torch.full((len(texts), 1), token)], dim=1)
            ahead += state_marginals(hmm, longer, t + 1)
        predicted = ahead / marginal.sum(-1, keepdim=True)
        assert_exact(filtered.predicted[:, t], predicted)


@pytest.mark.parametrize("form", FORMS)
def test_smoothing_equals_enumeration(form: str) -> None:
    hmm, texts = tiny_hmm(form), all_texts(LENGTH)
    texts = texts[path_probabilities(hmm, texts)[1].sum(0) > 0]
    posterior = hmm.smooth(texts)
    for t in range(LENGTH):
        marginal = state_marginals(hmm, texts, t)
        expected = marginal / marginal.sum(-1, keepdim=True)
        assert_exact(posterior[:, t], expected)


@pytest.mark.parametrize("form", FORMS)
def test_step_by_step_equals_whole_sequences(form: str) -> None:
    hmm, texts = tiny_hmm(form), all_texts(LENGTH)
    filtered = hmm.filter(texts)
    predicted = hmm.initial.expand(len(texts), -1)
    for t in range(LENGTH):
        stepped = inference.step(hmm, predicted, texts[:, t])
        for found, whole in zip(stepped, filtered, strict=True):
            torch.testing.assert_close(found, whole[:, t], rtol=0, atol=0)
        predicted = stepped.predicted


@pytest.mark.parametrize("form", FORMS)
def test_sampling_frequencies(form: str) -> None:
    hmm, length, count = tiny_hmm(form), 3, 200_000
    texts = all_texts(length)
    expected = path_probabilities(hmm, texts)[1].sum(0)
    drawn = hmm.sample(count, length, seed=1)
    index = (drawn * TOKENS ** torch.arange(length - 1, -1, -1)).sum(-1)
    observed = torch.bincount(index, minlength=len(texts))
    assert not observed[expected == 0].any()
    likely = expected > 0
    test = chisquare(observed[likely], (expected[likely] / expected.sum() * count))
    assert test.pvalue > 1e-3


def test_sampled_states_follow_the_transition() -> None:
    hmm, count = tiny_hmm("dense"), 100_000
    states = inference.sample(hmm, count, 2, torch.Generator().manual_seed(3)).states
    assert hmm.transition.num_states == 3
    observed = torch.bincount(states[:, 0] * 3 + states[:, 1], minlength=9)
    expected = hmm.initial[:, None] * hmm.transition.predict(torch.eye(3, dtype=torch.float64))
    assert chisquare(observed, expected.flatten() * count).pvalue > 1e-3


def test_sampling_is_deterministic_in_the_seed() -> None:
    hmm = tiny_hmm("sparse")
    assert torch.equal(hmm.sample(50, 9, seed=4), hmm.sample(50, 9, seed=4))
    assert not torch.equal(hmm.sample(50, 9, seed=4), hmm.sample(50, 9, seed=5))


@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_long_texts_neither_underflow_nor_drift(form: str) -> None:
    exact = (
        HMM.random(32, 500, seed=2, dtype=torch.float64)
        if form == "dense"
        else HMM(simplex(32, seed=1), simplex(32, 32, seed=2), sparse_emission(500, 32, share=0.05))
    )
    texts = exact.sample(4, 4096, seed=0)
    reference = exact.log_likelihood(texts)
    single = exact.to(dtype=torch.float32)
    torch.testing.assert_close(
        single.log_likelihood(texts).double(), reference, rtol=1e-5, atol=0.0
    )
    posterior = single.smooth(texts)
    assert posterior.isfinite().all()
    torch.testing.assert_close(posterior.double(), exact.smooth(texts), rtol=0, atol=1e-3)


def test_impossible_tokens_are_passed_over_at_a_fixed_price() -> None:
    # Token 3 is emitted by state 1 alone, and state 1 is never reached.
    hmm = HMM(
        initial=torch.tensor([1.0, 0.0]),
        transition=torch.tensor([[1.0, 0.0], [0.5, 0.5]]),
        emission=torch.tensor([[0.5, 0.0], [0.3, 0.0], [0.2, 0.0], [0.0, 1.0]]),
    )
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(0, 3, (2, 4096), generator=generator)
    plain = hmm.log_likelihood(texts)
    with_impossible = texts.clone()
    with_impossible[0, 100] = 3
    found = hmm.log_likelihood(with_impossible)
    mask = torch.ones_like(texts, dtype=torch.bool)
    mask[0, 100] = False
    passed_over = hmm.log_likelihood(texts, mask)
    price = torch.tensor([IMPOSSIBLE, 1.0]).log()
    torch.testing.assert_close(found, passed_over + price, rtol=1e-6, atol=0.0)
    assert found[1] == plain[1]
    everything = hmm.filter(with_impossible)
    assert all(values.isfinite().all() for values in everything)
    assert hmm.smooth(with_impossible).isfinite().all()
    double = hmm.to(dtype=torch.float64).log_likelihood(with_impossible)
    torch.testing.assert_close(found.double(), double, rtol=1e-5, atol=0.0)


def test_smoothing_survives_a_better_explanation_that_cannot_be_reached() -> None:
    # State 1 explains the text far better, but the chain is in state 0 for good.
    hmm = HMM(
        initial=torch.tensor([1.0, 0.0]),
        transition=torch.eye(2),
        emission=torch.tensor([[0.01, 0.99], [0.99, 0.01]]),
    )
    posterior = hmm.smooth(torch.zeros(1, 500, dtype=torch.long))
    torch.testing.assert_close(posterior[0, :, 0], torch.ones(500))


def test_a_change_of_mind_that_single_precision_can_just_follow() -> None:
    """States that stick, and evidence that turns: exact in float64, finite in float32."""
    sticky = HMM(
        torch.tensor([0.5, 0.5], dtype=torch.float64),
        torch.eye(2, dtype=torch.float64),
        torch.tensor([[0.9999, 0.0001], [0.0001, 0.9999]], dtype=torch.float64),
    )
    for first, then in ((10, 30), (12, 40)):
        text = torch.tensor([[0] * first + [1] * then])
        torch.testing.assert_close(
            sticky.smooth(text)[0, :, 1], torch.ones(first + then, dtype=torch.float64)
        )
        single = sticky.to(dtype=torch.float32)
        posterior = single.smooth(text)
        assert posterior.isfinite().all()
        torch.testing.assert_close(posterior.sum(-1), torch.ones(1, first + then))
        assert single.log_likelihood(text) <= sticky.log_likelihood(text).float() + 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_predicted_beliefs_sum_to_one_in_every_dtype(dtype: torch.dtype) -> None:
    hmm = HMM.random(50, 30, seed=0).to(dtype=dtype)
    filtered = hmm.filter(hmm.sample(4, 60, seed=0))
    for belief in (filtered.belief, filtered.predicted):
        torch.testing.assert_close(belief.sum(-1), torch.ones(4, 60), rtol=0, atol=1e-5)


@given(
    seed=st.integers(0, 1000),
    form=st.sampled_from(FORMS),
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=5),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_batches_and_padding_change_nothing(
    seed: int, form: str, lengths: list[int], data: st.DataObject
) -> None:
    """Rows of a padded batch, padded on either side, equal the same rows alone."""
    hmm = tiny_hmm(form, seed)
    width = max(lengths) + 2
    tokens = torch.full((len(lengths), width), -100)  # padding may hold anything
    mask = torch.zeros(len(lengths), width, dtype=torch.bool)
    texts = []
    for row, length in enumerate(lengths):
        text = torch.tensor(
            data.draw(st.lists(st.integers(0, 3), min_size=length, max_size=length))
        )
        left = data.draw(st.integers(0, width - length))
        tokens[row, left : left + length] = text
        mask[row, left : left + length] = True
        texts.append(text)
    likelihood, posterior = hmm.log_likelihood(tokens, mask), hmm.smooth(tokens, mask)
    filtered = hmm.filter(tokens, mask)
    for row, text in enumerate(texts):
        alone, seen = hmm.filter(text[None]), mask[row]
        assert_exact(likelihood[row], hmm.log_likelihood(text[None])[0])
        assert_exact(posterior[row, seen], hmm.smooth(text[None])[0])
        assert not posterior[row, ~seen].any()
        for padded, unpadded in zip(filtered, alone, strict=True):
            assert_exact(padded[row, seen], unpadded[0])
        # what follows the text starts from the text's end, however it was padded
        assert_exact(filtered.predicted[row, -1], alone.predicted[0, -1])


def test_gaps_in_the_middle_are_passed_over() -> None:
    hmm = tiny_hmm("dense")
    mask = torch.tensor([[True, False, True, True]])
    gapped = hmm.log_likelihood(torch.tensor([[1, 3, 2, 0]]), mask)
    torch.testing.assert_close(gapped, hmm.log_likelihood(torch.tensor([[1, 2, 0]])))
