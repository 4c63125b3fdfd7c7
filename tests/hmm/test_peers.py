"""Comparison with hmmlearn, a reference implementation."""

import numpy as np
import torch
from hmmlearn.hmm import CategoricalHMM

from foretrace.hmm import HMM


def test_log_likelihood_equals_hmmlearn() -> None:
    hmm = HMM.random(64, 1000, seed=7, dtype=torch.float64)
    peer = CategoricalHMM(n_components=64, init_params="", params="")
    peer.startprob_ = hmm.initial.numpy()
    identity = torch.eye(64, dtype=torch.float64)
    peer.transmat_ = hmm.transition.predict(identity).numpy()
    peer.emissionprob_ = hmm.emission.predict(identity).numpy()
    peer.n_features = 1000
    texts = hmm.sample(200, 40, seed=1)
    expected = np.array([peer.score(text.numpy()[:, None]) for text in texts])
    np.testing.assert_allclose(hmm.log_likelihood(texts).numpy(), expected, rtol=1e-9)
