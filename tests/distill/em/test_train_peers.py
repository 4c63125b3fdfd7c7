"""Full-batch EM equals hmmlearn's, iteration by iteration."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hmmlearn.hmm import CategoricalHMM

from foretrace.distill import Corpus, EMConfig, Manifest, train
from foretrace.hmm import HMM
from tiny import dense_tables

STATES, VOCAB, LENGTH, ROWS = 8, 40, 20, 100


@pytest.mark.parametrize("iterations", [1, 5])
def test_full_batch_em_equals_hmmlearn(iterations: int, tmp_path: Path) -> None:
    texts = HMM.random(STATES, VOCAB, seed=1, dtype=torch.float64).sample(ROWS, LENGTH, seed=0)
    start = HMM.random(STATES, VOCAB, seed=2, dtype=torch.float64)
    corpus = Corpus.create(tmp_path, Manifest(length=LENGTH, vocab_size=VOCAB))
    corpus.append(texts)
    config = EMConfig(
        epochs=iterations,
        batch_size=ROWS,
        last_step=1.0,
        pseudocount=0.0,
        dtype="float64",
        held_out=0,
    )
    ours = train(start, corpus, config)

    peer = CategoricalHMM(
        STATES,
        n_iter=iterations,
        tol=-np.inf,
        init_params="",
        implementation="scaling",
        n_features=VOCAB,
        startprob_prior=1.0,
        transmat_prior=1.0,
        emissionprob_prior=1.0,
    )
    initial, transition, emission = dense_tables(start)
    peer.startprob_, peer.transmat_ = initial.numpy(), transition.numpy()
    peer.emissionprob_ = emission.T.numpy()
    peer.fit(texts.reshape(-1, 1).numpy(), [LENGTH] * ROWS)

    found_initial, found_transition, found_emission = dense_tables(ours)
    np.testing.assert_allclose(found_initial, peer.startprob_, atol=1e-8)
    np.testing.assert_allclose(found_transition, peer.transmat_, atol=1e-8)
    np.testing.assert_allclose(found_emission.T, peer.emissionprob_, atol=1e-8)
    theirs = peer.score(texts.reshape(-1, 1).numpy(), [LENGTH] * ROWS)
    assert float(ours.log_likelihood(texts).sum()) == pytest.approx(theirs, rel=1e-8)
