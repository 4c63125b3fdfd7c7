"""Counts with a lazy decay factor give the same probabilities as counts that decay at once."""

import torch

from foretrace.distill.em import m_step
from foretrace.distill.em.e_step import BatchCounts, Workspace
from foretrace.distill.em.m_step import Counts
from foretrace.hmm import HMM, HMMConfig
from tiny import dense_tables

STATES, VOCAB = 5, 30


def start(eos: int | None = None) -> Counts:
    hmm = HMM.random(STATES, VOCAB, eos_token_id=eos, seed=0, dtype=torch.float64)
    return Counts.from_hmm(hmm, 10, pseudocount=1e-3, ends=hmm.config.eos_token_ids)


def random_batch(seed: int) -> tuple[torch.Tensor, BatchCounts]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randperm(VOCAB, generator=generator)[:6].sort().values
    batch = BatchCounts.zeros(6, STATES, Workspace(torch.zeros(1, dtype=torch.float64)))
    batch.flat.copy_(torch.rand(batch.flat.shape, generator=generator, dtype=torch.float64))
    batch.summary[1] = 4
    return tokens, batch


def test_lazy_decay_equals_decay() -> None:
    """In 120 steps of falling size, the factor is multiplied in several times."""
    lazy, folds = start(), 0
    emission = lazy.emission.clone()
    for step in range(120):
        tokens, batch = random_batch(step)
        size = 1 - step / 120
        before = lazy.factor
        lazy.update(tokens, batch, size)
        folds += lazy.factor > before
        emission *= 1 - size
        emission[tokens] += size * batch.rows / 4
        torch.testing.assert_close(lazy.emission * lazy.factor, emission, rtol=1e-9, atol=1e-300)
        torch.testing.assert_close(lazy.total, emission.sum(0), rtol=1e-9, atol=0)
    assert folds >= 2
    assert m_step.SMALLEST_FACTOR <= lazy.factor <= 1


def test_counts_can_have_other_ends_than_the_hmm() -> None:
    """The counts reproduce the HMM, but for the tokens that end texts now."""
    hmm = HMM.random(STATES, VOCAB, eos_token_id=0, seed=0, dtype=torch.float64)
    counts = Counts.from_hmm(hmm, 10, pseudocount=0.0, ends=(7, 0))
    _, transition, emission = dense_tables(hmm)
    emission[7, :-1] = 0.0
    emission[:, -1] = 0.0
    emission[7, -1] = 1.0
    parameters = counts.parameters(torch.arange(1, VOCAB))
    torch.testing.assert_close(parameters.rows, (emission / emission.sum(0))[1:])
    torch.testing.assert_close(parameters.transition, transition)
    trained = counts.to_hmm(HMMConfig(eos_token_ids=(7, 0)))
    assert (dense_tables(trained)[2][[0, 7], :-1] == 0).all()


def test_rows_of_a_batch_equal_rows_of_the_hmm() -> None:
    for eos in (None, 7):
        counts = start(eos)
        for step in range(5):
            counts.update(*random_batch(step), 0.5)
        tokens = torch.tensor([0, 7, 12])
        all_rows = counts.parameters(torch.arange(VOCAB)).rows.clone()
        parameters = counts.parameters(tokens)
        torch.testing.assert_close(all_rows.sum(0), torch.ones(STATES, dtype=torch.float64))
        hmm = counts.to_hmm(HMMConfig(eos_token_ids=() if eos is None else (eos,)))
        initial, transition, emission = dense_tables(hmm)
        torch.testing.assert_close(parameters.rows, emission[tokens])
        torch.testing.assert_close(parameters.transition, transition)
        torch.testing.assert_close(parameters.initial, initial)


def test_end_of_text_is_fixed_not_learnt() -> None:
    counts = start(eos=7)
    for step in range(5):
        counts.update(*random_batch(step), 0.5)
    _, transition, emission = dense_tables(counts.to_hmm(HMMConfig(eos_token_ids=(7,))))
    last = torch.eye(STATES, dtype=torch.float64)[-1]
    assert torch.equal(transition[-1], last)
    assert torch.equal(emission[7], last)
    assert emission[:7, -1].sum() == 0


def test_a_state_without_counts_has_a_distribution() -> None:
    counts = start()
    counts.pseudocount = 0.0
    tokens, batch = random_batch(0)
    batch.flat.zero_()
    batch.summary[1] = 1
    counts.update(tokens, batch, 1.0)
    assert counts.parameters(tokens).rows.isfinite().all()
    counts.initial[0] = 1.0
    hmm = counts.to_hmm(HMMConfig())  # would raise if a row did not sum to 1
    assert hmm.num_states == STATES


def test_a_checkpoint_restores_all_counts() -> None:
    counts, other = start(), start()
    for step in range(7):
        counts.update(*random_batch(step), 0.7)
    other.restore({name: tensor.clone() for name, tensor in counts.tensors().items()})
    for updated in (counts, other):
        updated.update(*random_batch(99), 0.3)
    tensors = other.tensors()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in counts.tensors().items())
