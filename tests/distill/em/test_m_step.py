"""Counts fade lazily, and make the same probabilities as counts that fade at once."""

import torch

from foretrace.distill.em import m_step as module
from foretrace.distill.em.e_step import BatchCounts
from foretrace.distill.em.m_step import Counts
from foretrace.distill.em.workspace import Workspace
from foretrace.hmm import HMM, HMMConfig
from tiny import dense_tables

STATES, VOCAB = 5, 30


def start(eos: int | None = None) -> Counts:
    hmm = HMM.random(STATES, VOCAB, eos_token_id=eos, seed=0, dtype=torch.float64)
    return Counts.from_hmm(hmm, 10, pseudocount=1e-3, eos_token_id=eos)


def random_batch(seed: int) -> tuple[torch.Tensor, BatchCounts]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randperm(VOCAB, generator=generator)[:6].sort().values
    new = BatchCounts.zeros(6, STATES, Workspace(torch.zeros(1, dtype=torch.float64)))
    new.flat.copy_(torch.rand(new.flat.shape, generator=generator, dtype=torch.float64))
    new.summary[1] = 4
    return tokens, new


def test_fading_lazily_is_fading() -> None:
    """120 steps of falling size: the factor is folded in several times on the way."""
    lazy, folds = start(), 0
    emission = lazy.emission.clone()
    for step in range(120):
        tokens, new = random_batch(step)
        size = 1 - step / 120
        before = lazy.factor
        lazy.update(tokens, new, size)
        folds += lazy.factor > before
        emission *= 1 - size
        emission[tokens] += size * new.rows / 4
        torch.testing.assert_close(lazy.emission * lazy.factor, emission, rtol=1e-9, atol=1e-300)
        torch.testing.assert_close(lazy.total, emission.sum(0), rtol=1e-9, atol=0)
    assert folds >= 2
    assert module.SMALLEST_FACTOR <= lazy.factor <= 1


def test_rows_of_a_batch_are_rows_of_the_hmm() -> None:
    for eos in (None, 7):
        made = start(eos)
        for step in range(5):
            made.update(*random_batch(step), 0.5)
        tokens = torch.tensor([0, 7, 12])
        everything = made.parameters(torch.arange(VOCAB)).rows.clone()
        parameters = made.parameters(tokens)
        torch.testing.assert_close(everything.sum(0), torch.ones(STATES, dtype=torch.float64))
        hmm = made.to_hmm(HMMConfig(eos_token_ids=() if eos is None else (eos,)))
        initial, transition, emission = dense_tables(hmm)
        torch.testing.assert_close(parameters.rows, emission[tokens])
        torch.testing.assert_close(parameters.transition, transition)
        torch.testing.assert_close(parameters.initial, initial)


def test_end_of_text_is_not_learnt_but_given() -> None:
    made = start(eos=7)
    for step in range(5):
        made.update(*random_batch(step), 0.5)  # whatever the counts say
    _, transition, emission = dense_tables(made.to_hmm(HMMConfig(eos_token_ids=(7,))))
    last = torch.eye(STATES, dtype=torch.float64)[-1]
    assert torch.equal(transition[-1], last)
    assert torch.equal(emission[7], last)
    assert emission[:7, -1].sum() == 0


def test_what_was_never_visited_is_still_a_distribution() -> None:
    made = start()
    made.pseudocount = 0.0
    tokens, new = random_batch(0)
    new.flat.zero_()
    new.summary[1] = 1
    made.update(tokens, new, 1.0)
    assert made.parameters(tokens).rows.isfinite().all()
    made.initial[0] = 1.0
    hmm = made.to_hmm(HMMConfig())  # would raise if a row did not sum to 1
    assert hmm.num_states == STATES


def test_a_checkpoint_holds_everything() -> None:
    made, other = start(), start()
    for step in range(7):
        made.update(*random_batch(step), 0.7)
    other.restore({name: tensor.clone() for name, tensor in made.tensors().items()})
    for counts in (made, other):
        counts.update(*random_batch(99), 0.3)
    assert all(torch.equal(made.tensors()[name], other.tensors()[name]) for name in made.tensors())
