"""Inference equals enumeration of all state paths, and does not depend on padding."""

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


def assert_exact(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
def test_likelihood_equals_enumeration(form: str) -> None:
    hmm, texts = tiny_hmm(form), all_texts(LENGTH)
    _, joint = path_probabilities(hmm, texts)
    possible = joint.sum(0) > 0
    likelihood = hmm.log_likelihood(texts).exp()
    assert_exact(likelihood[possible], joint.sum(0)[possible])
    assert float(joint.sum()) == pytest.approx(1, abs=1e-12)  # the enumeration is complete


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
def test_steps_equal_the_filter(form: str) -> None:
    hmm, texts = tiny_hmm(form), all_texts(LENGTH)
    filtered = hmm.filter(texts)
    predicted = hmm.initial.expand(len(texts), -1)
    for t in range(LENGTH):
        stepped = inference.step(hmm, predicted, texts[:, t])
        for at_step, at_all in zip(stepped, filtered, strict=True):
            torch.testing.assert_close(at_step, at_all[:, t], rtol=0, atol=0)
        predicted = stepped.predicted


@pytest.mark.parametrize("form", FORMS)
def test_sampling_frequencies_equal_probabilities(form: str) -> None:
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


def test_sampling_in_chunks_draws_as_many_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    hmm = tiny_hmm("dense")
    for sequences in (0, 1, 4):  # per chunk; 0: there is not enough memory for one
        monkeypatch.setattr(inference, "CHUNK_ELEMENTS", 3 * sequences)
        assert hmm.sample(10, 2, seed=1).shape == (10, 2)


def test_a_seed_makes_sampling_deterministic() -> None:
    hmm = tiny_hmm("sparse")
    assert torch.equal(hmm.sample(50, 9, seed=4), hmm.sample(50, 9, seed=4))
    assert not torch.equal(hmm.sample(50, 9, seed=4), hmm.sample(50, 9, seed=5))


@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_long_sequences_stay_accurate_in_float32(form: str) -> None:
    exact = (
        HMM.random(32, 500, seed=2, dtype=torch.float64)
        if form == "dense"
        else HMM(simplex(32, seed=1), simplex(32, 32, seed=2), sparse_emission(500, 32, share=0.05))
    )
    texts = exact.sample(4, 1024, seed=0)
    reference = exact.log_likelihood(texts)
    single = exact.to(dtype=torch.float32)
    likelihood = single.log_likelihood(texts)
    assert likelihood.dtype == torch.float32
    torch.testing.assert_close(likelihood.double(), reference, rtol=1e-5, atol=0.0)
    posterior = single.smooth(texts)
    assert posterior.isfinite().all()
    torch.testing.assert_close(posterior.double(), exact.smooth(texts), rtol=0, atol=1e-3)


def test_impossible_tokens_are_skipped_with_a_fixed_log_probability() -> None:
    # Token 3 is emitted by state 1 alone, and state 1 is never reached.
    hmm = HMM(
        initial=torch.tensor([1.0, 0.0]),
        transition=torch.tensor([[1.0, 0.0], [0.5, 0.5]]),
        emission=torch.tensor([[0.5, 0.0], [0.3, 0.0], [0.2, 0.0], [0.0, 1.0]]),
    )
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(0, 3, (2, 1024), generator=generator)
    plain = hmm.log_likelihood(texts)
    with_impossible = texts.clone()
    with_impossible[0, 100] = 3
    likelihood = hmm.log_likelihood(with_impossible)
    mask = torch.ones_like(texts, dtype=torch.bool)
    mask[0, 100] = False
    skipped = hmm.log_likelihood(texts, mask)
    penalty = torch.tensor([IMPOSSIBLE, 1.0]).log()
    torch.testing.assert_close(likelihood, skipped + penalty, rtol=1e-6, atol=0.0)
    assert likelihood[1] == plain[1]
    filtered = hmm.filter(with_impossible)
    assert all(values.isfinite().all() for values in filtered)
    assert hmm.smooth(with_impossible).isfinite().all()
    double = hmm.to(dtype=torch.float64).log_likelihood(with_impossible)
    torch.testing.assert_close(likelihood.double(), double, rtol=1e-5, atol=0.0)


def test_smoothing_ignores_unreachable_states() -> None:
    # State 1 explains the tokens better, but the chain cannot leave state 0.
    hmm = HMM(
        initial=torch.tensor([1.0, 0.0]),
        transition=torch.eye(2),
        emission=torch.tensor([[0.01, 0.99], [0.99, 0.01]]),
    )
    posterior = hmm.smooth(torch.zeros(1, 500, dtype=torch.long))
    torch.testing.assert_close(posterior[0, :, 0], torch.ones(500))


def test_smoothing_of_contradicting_tokens() -> None:
    """With absorbing states, late contrary tokens: exact in float64, finite in float32."""
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
def test_padding_changes_no_result(
    seed: int, form: str, lengths: list[int], data: st.DataObject
) -> None:
    """Sequences padded on either side in a batch equal the same sequences alone."""
    hmm = tiny_hmm(form, seed)
    width = max(lengths) + 2
    tokens = torch.full((len(lengths), width), -100)  # padding may be any number
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
        alone, present = hmm.filter(text[None]), mask[row]
        assert_exact(likelihood[row], hmm.log_likelihood(text[None])[0])
        assert_exact(posterior[row, present], hmm.smooth(text[None])[0])
        assert not posterior[row, ~present].any()
        for padded, unpadded in zip(filtered, alone, strict=True):
            assert_exact(padded[row, present], unpadded[0])
        # the prediction after the last position is that after the last token
        assert_exact(filtered.predicted[row, -1], alone.predicted[0, -1])


def test_masked_positions_in_the_middle_are_skipped() -> None:
    hmm = tiny_hmm("dense")
    mask = torch.tensor([[True, False, True, True]])
    gapped = hmm.log_likelihood(torch.tensor([[1, 3, 2, 0]]), mask)
    torch.testing.assert_close(gapped, hmm.log_likelihood(torch.tensor([[1, 2, 0]])))
