"""The HMM class: immutability, checks of arguments, and conversions."""

from dataclasses import FrozenInstanceError

import pytest
import torch

from foretrace.errors import InvalidInputError, InvalidModelError
from foretrace.hmm import HMM, HMMConfig, SparseEmission, inference
from tiny import FORMS, KroneckerTransition, all_texts, simplex, sparse_emission, tiny_hmm


def test_attributes_cannot_be_assigned() -> None:
    hmm = tiny_hmm("dense")
    with pytest.raises(FrozenInstanceError):
        hmm.initial = torch.ones(3)  # type: ignore[misc]


def test_repr_and_size() -> None:
    hmm = HMM.random(8, 20, eos_token_id=4)
    assert repr(hmm) == "HMM(8 states, 20 tokens, dense transition, dense emission, float32, cpu)"
    assert hmm.nbytes == 4 * (8 + 64 + 160)
    assert hmm.config.eos_token_ids == (4,)


def test_the_end_of_text_state_is_absorbing() -> None:
    texts = HMM.random(8, 20, eos_token_id=4, seed=1).sample(500, 30, seed=0)
    ended = (texts == 4).cumsum(1) > 0
    assert ended[:, -1].any()
    assert (texts[ended] == 4).all()


def test_a_unigram_hmm_emits_tokens_at_their_frequencies() -> None:
    hmm = HMM.unigram(torch.tensor([3, 1, 0, 4]), eos_token_ids=[3], source_model="my-lm")
    assert hmm.is_unigram
    torch.testing.assert_close(hmm.token_frequencies(), torch.tensor([0.75, 0.25, 0, 0]).double())
    assert bool((hmm.emission.predict(torch.ones(1, 1)) > 0).all())  # no token is impossible
    assert hmm.config == HMMConfig((3,), None, "my-lm", {"method": "unigram"})
    for wrong in (torch.zeros(3), torch.tensor([1.0, -1]), torch.ones(2, 2), torch.ones(0)):
        with pytest.raises(InvalidModelError, match="Frequencies must be"):
            HMM.unigram(wrong)


def test_a_seed_makes_random_deterministic() -> None:
    assert torch.equal(HMM.random(5, 9, seed=3).initial, HMM.random(5, 9, seed=3).initial)
    assert not torch.equal(HMM.random(5, 9, seed=3).initial, HMM.random(5, 9, seed=4).initial)


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_converting_between_dtypes(form: str, source: torch.dtype, target: torch.dtype) -> None:
    dense, sparse = simplex(200, 30, seed=2, dim=0), sparse_emission(200, 30, share=0.1)
    emission = sparse if form == "sparse" else dense
    exact = HMM(simplex(30, seed=0), simplex(30, 30, seed=1), emission)
    texts = exact.sample(8, 100, seed=0)
    converted = exact.to(dtype=source).to(dtype=target)
    assert converted.dtype == target
    assert converted.initial.dtype in (torch.float32, torch.float64)  # beliefs are not narrower
    per_token = converted.log_likelihood(texts).double() / 100
    torch.testing.assert_close(per_token, exact.log_likelihood(texts) / 100, rtol=0, atol=2e-3)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ((simplex(3, seed=0), simplex(4, 4, seed=0), simplex(5, 4, seed=0, dim=0)), "must agree"),
        ((simplex(4, seed=0), simplex(4, 4, seed=0), simplex(5, 3, seed=0, dim=0)), "token-major"),
        ((simplex(4, seed=0), simplex(4, 4, seed=0), simplex(4, 5, seed=0)), "transposed"),
        ((torch.ones(1, 4), simplex(4, 4, seed=0), simplex(5, 4, seed=0, dim=0)), "be .states"),
        ((torch.ones(4), simplex(4, 4, seed=0), simplex(5, 4, seed=0, dim=0)), "initial"),
        (
            (simplex(4, seed=0), torch.eye(4).long(), simplex(5, 4, seed=0, dim=0)),
            "cannot be int64",
        ),
    ],
)
def test_invalid_tables_are_refused(
    tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor], message: str
) -> None:
    with pytest.raises(InvalidModelError, match=message):
        HMM(*tables)


def test_end_of_text_tokens_must_be_in_the_vocabulary() -> None:
    with pytest.raises(InvalidModelError, match="eos_token_ids"):
        HMM(
            simplex(3, seed=0),
            simplex(3, 3, seed=0),
            simplex(4, 3, seed=0, dim=0),
            HMMConfig(eos_token_ids=(4,)),
        )


@pytest.mark.parametrize(
    ("tokens", "mask", "message"),
    [
        (torch.tensor([[0, 4]]), None, "vocabulary from 0 to 3"),
        (torch.tensor([[0, -100]]), None, "mask them"),
        (torch.tensor([0, 1]), None, "batch, length"),
        (torch.tensor([[0.5]]), None, "must be ids"),
        (torch.zeros(2, 0, dtype=torch.long), None, "at least 1 by 1"),
        (torch.tensor([[0, 1]]), torch.tensor([True, True]), "mask has shape"),
    ],
)
def test_invalid_tokens_are_refused(
    tokens: torch.Tensor, mask: torch.Tensor | None, message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        tiny_hmm("dense").log_likelihood(tokens, mask)


def test_lists_of_tokens_are_accepted_and_arrays_of_tables_refused() -> None:
    hmm = tiny_hmm("dense")
    assert hmm.log_likelihood([[0, 1]]).shape == (1,)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="torch tensor"):
        HMM(hmm.initial.numpy(), hmm.transition, hmm.emission)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="vocabulary ends at 3"):
        HMM.random(3, 4, eos_token_id=9)


def test_sampling_no_sequences_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="at least 1"):
        tiny_hmm("dense").sample(0, 5)


@pytest.mark.parametrize("form", FORMS)
def test_token_frequencies_are_the_mean_over_all_sequences(form: str) -> None:
    hmm, length = tiny_hmm(form), 3
    texts = all_texts(length)
    probabilities = hmm.log_likelihood(texts).double().exp()
    counts = torch.nn.functional.one_hot(texts, hmm.vocab_size).double().sum(1)
    expected = probabilities @ counts / length
    ends = list(hmm.config.eos_token_ids)
    expected[ends] = 0.0
    frequencies = hmm.token_frequencies(length)
    torch.testing.assert_close(frequencies, expected / expected.sum(), rtol=0, atol=1e-6)
    with pytest.raises(InvalidInputError, match="at least 1 token"):
        hmm.token_frequencies(0)


def test_32768_states_and_262144_tokens() -> None:
    """The largest supported size, with a structured transition and a sparse emission."""
    states, vocab, per_token = 32_768, 262_144, 4
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(0, states // per_token, (vocab, per_token), generator=generator)
    chosen = chosen + torch.arange(per_token) * (states // per_token)  # ascending, no duplicates
    # the first tokens cover all states, so that every state has an entry
    chosen[: states // per_token] = torch.arange(states // per_token)[:, None] + torch.arange(
        per_token
    ) * (states // per_token)
    emission = SparseEmission(
        offsets=torch.arange(0, vocab * per_token + 1, per_token),
        states=chosen.flatten(),
        values=torch.rand(vocab * per_token, generator=generator) + 0.01,
        background=torch.full((vocab,), 1 / vocab),
        leak=torch.full((states,), 0.1),
    )
    transition = KroneckerTransition(
        simplex(128, 128, seed=0).float(), simplex(256, 256, seed=1).float()
    )
    hmm = HMM(torch.full((states,), 1 / states), transition, emission)
    texts = hmm.sample(8, 16, seed=0)
    assert hmm.log_likelihood(texts).isfinite().all()
    stepped = inference.step(hmm, hmm.initial.expand(8, -1), texts[:, 0])
    torch.testing.assert_close(stepped.belief.sum(-1), torch.ones(8))
    next_token = hmm.emission.predict(stepped.predicted)
    torch.testing.assert_close(next_token.sum(-1), torch.ones(8), rtol=1e-4, atol=0)
    assert hmm.nbytes < 20e6
