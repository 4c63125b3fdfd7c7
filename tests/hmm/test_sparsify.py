"""The loss of sparsifying stays within the tolerance, on an HMM trained by EM."""

import numpy as np
import pytest
import torch
from hmmlearn.hmm import CategoricalHMM
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM, SparseEmission
from tiny import all_texts, tiny_hmm

STATES, VOCAB, LENGTH = 32, 800, 24


@pytest.fixture(scope="module")
def texts() -> torch.Tensor:
    """Sequences of an HMM in which each state emits a small part of the vocabulary."""
    generator = torch.Generator().manual_seed(0)
    frequency = 1 / torch.arange(1, VOCAB + 1).double()
    emitted = torch.rand(VOCAB, STATES, generator=generator) < 0.04
    emitted[torch.arange(STATES), torch.arange(STATES)] = True
    emission = frequency[:, None] * emitted
    source = HMM.random(STATES, VOCAB, seed=1, dtype=torch.float64)
    generating = HMM(source.initial, source.transition, emission / emission.sum(0))
    return generating.sample(3000, LENGTH, seed=2)


@pytest.fixture(scope="module")
def trained(texts: torch.Tensor) -> HMM:
    """An HMM trained by hmmlearn's EM on 2,000 sequences, smoothed by a pseudocount."""
    start = HMM.random(
        STATES, VOCAB, seed=1, dtype=torch.float64
    )  # with the transition of the source
    peer = CategoricalHMM(
        STATES, init_params="", n_iter=25, implementation="scaling", tol=0, n_features=VOCAB
    )
    identity = torch.eye(STATES, dtype=torch.float64)
    peer.startprob_ = start.initial.numpy()
    peer.transmat_ = start.transition.predict(identity).numpy()
    peer.emissionprob_ = start.emission.predict(identity).numpy()
    training = texts[:2000].numpy()
    peer.fit(training.reshape(-1, 1), [LENGTH] * len(training))
    emission = torch.from_numpy(np.ascontiguousarray(peer.emissionprob_.T)) + 1e-6
    initial, transition = torch.from_numpy(peer.startprob_), torch.from_numpy(peer.transmat_)
    return HMM(initial, transition, emission / emission.sum(0))


@pytest.mark.parametrize("tolerance", [1e-2, 1e-3, 1e-4])
def test_the_loss_is_within_the_tolerance(
    trained: HMM, texts: torch.Tensor, tolerance: float
) -> None:
    sparse = trained.sparsify(tolerance)
    assert isinstance(sparse.emission, SparseEmission)
    tokens = torch.arange(VOCAB)
    exact, approximate = trained.emission.of_tokens(tokens), sparse.emission.of_tokens(tokens)
    torch.testing.assert_close(approximate.sum(0), torch.ones(STATES, dtype=torch.float64))
    divergence = (torch.xlogy(exact, exact) - torch.xlogy(exact, approximate)).sum(0)  # (h,)
    assert divergence.max() <= tolerance
    cost = sparse.config.sparsification
    assert cost is not None
    assert cost["nats_per_token"] == pytest.approx(float(divergence.max()), abs=1e-9)
    distance = (exact - approximate).abs().sum(0).max() / 2
    assert cost["total_variation"] == pytest.approx(float(distance), abs=1e-9)
    assert distance <= (tolerance / 2) ** 0.5  # Pinsker's inequality
    for sample in (
        trained.sample(1000, LENGTH, seed=5),
        texts[2000:],
    ):  # from the HMM itself, and held out
        lost = (trained.log_likelihood(sample) - sparse.log_likelihood(sample)) / LENGTH
        assert lost.mean() <= tolerance
    assert cost["density"] < 0.6


def test_a_smaller_tolerance_stores_more_entries(trained: HMM) -> None:
    densities = []
    for tolerance in (1e-1, 1e-2, 1e-3, 1e-4):
        cost = trained.sparsify(tolerance).config.sparsification
        assert cost is not None
        densities.append(cost["density"])
    assert densities == sorted(densities)
    assert densities[0] < densities[-1]


@pytest.mark.parametrize("seed", range(5))
def test_the_expected_loss_over_all_sequences_is_bounded(seed: int) -> None:
    """The expected loss over all sequences of 5 tokens is at most 5 tolerances."""
    dense, tolerance = tiny_hmm("dense", seed), 0.2
    sparse = dense.sparsify(tolerance)
    exact, approximate = (hmm.log_likelihood(all_texts(5)) for hmm in (dense, sparse))
    loss = (exact.exp() * (exact - approximate)).sum()
    assert 0 <= loss + 1e-12 <= 5 * tolerance


def test_a_smoothed_table_loses_almost_nothing() -> None:
    """The background represents a constant floor exactly, because it has rank one."""
    table = torch.full((500, 6), 1e-5, dtype=torch.float64)
    table[torch.arange(60), torch.arange(60) % 6] = 0.1
    hmm = HMM.random(6, 500, seed=0, dtype=torch.float64)
    sparse = HMM(hmm.initial, hmm.transition, table / table.sum(0)).sparsify(1e-3)
    assert sparse.config.sparsification is not None
    assert sparse.config.sparsification["density"] == pytest.approx(60 / 3000)
    assert sparse.config.sparsification["nats_per_token"] < 2e-4


@given(
    seed=st.integers(0, 1000),
    states=st.integers(1, 40),
    vocab=st.integers(2, 60),
    sharpness=st.sampled_from([0.3, 1.0, 4.0, 30.0]),
    tolerance=st.sampled_from([1e-6, 1e-5, 1e-4, 1e-3, 1e-1]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
@settings(max_examples=60, deadline=None)
def test_the_loss_of_any_table_is_within_the_tolerance(
    seed: int, states: int, vocab: int, sharpness: float, tolerance: float, dtype: torch.dtype
) -> None:
    """Sparsifying terminates and keeps the bound for flat and for peaked tables."""
    hmm = HMM.random(states, vocab, seed=seed, dtype=dtype)
    table = hmm.emission.of_tokens(torch.arange(vocab)) ** sharpness
    sharp = HMM(hmm.initial, hmm.transition, table / table.sum(0))
    cost = sharp.sparsify(tolerance).config.sparsification
    assert cost is not None
    assert cost["nats_per_token"] <= tolerance


def test_a_table_with_denormal_entries() -> None:
    table = torch.full((40, 3), 1e-43)
    table[0], table[1] = 0.25, 0.75
    hmm = HMM(torch.full((3,), 1 / 3), torch.eye(3), table)
    cost = hmm.sparsify(1e-3).config.sparsification
    assert cost is not None
    assert cost["nats_per_token"] <= 1e-3


@pytest.mark.parametrize("tolerance", [0.0, -1.0, 2.0, float("nan")])
def test_a_tolerance_out_of_range_is_refused(trained: HMM, tolerance: float) -> None:
    with pytest.raises(InvalidInputError, match="nats per token"):
        trained.sparsify(tolerance)


def test_sparsifying_twice_is_refused(trained: HMM) -> None:
    with pytest.raises(InvalidInputError, match="already"):
        trained.sparsify(0.1).sparsify(0.1)
