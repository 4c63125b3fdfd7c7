"""Penalised logistic regression on token presence: the rewards of evidence.

A token counts once per text. The reward of a token that occurs in n of N texts has a Gaussian
prior, whose standard deviation at a penalty of 1 is a tenth of the token's information,
log(N / n). Words that occur in most texts therefore stay almost neutral, and rare words that occur
with one label only count more.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.sparse import csr_array, diags_array
from threadpoolctl import threadpool_limits

from foretrace.attribute.fitting.objectives import MAX_ITERATIONS, THREAD_LIMIT_LOCK, Array

UNIT_PRECISION = 100.0  # of a reward at penalty 1, per squared information of its token
MIN_PRECISION = 1e-6  # a penalty of 0 would let the rewards of separable texts grow without end
MAX_RATE = 0.999  # the start has a finite bias if almost all texts have the attribute
TOLERANCE = 1e-6  # of the loss, relative
SOFTMAX_TOLERANCE = 1e-4  # the ranking of 95 labels no longer changes
SOFTMAX_MEMORY = 5  # pairs of L-BFGS: each costs two copies of all rewards


class Regression(NamedTuple):
    """Log-odds that are linear in the presence of M tokens: one column per label, or one alone."""

    biases: Array  # (K,)
    rewards: Array  # (M, K)


def logistic(presence: csr_array, targets: Array, penalty: float) -> Regression:
    """Fit sigma(bias + sum of rewards) to targets in [0, 1] by cross-entropy."""
    rate = float(np.clip(targets.mean(), 1 - MAX_RATE, MAX_RATE))
    bias = np.log(rate) - np.log1p(-rate)

    def residuals(log_odds: Array) -> tuple[float, Array]:
        z = log_odds[:, 0]
        loss = np.logaddexp(0, z).sum() - targets @ z
        return float(loss), (0.5 * (1 + np.tanh(0.5 * z)) - targets)[:, None]

    problem = _Problem(presence, penalty, 0.25)
    return problem.minimize(np.array([bias]), residuals, {"ftol": TOLERANCE})


def softmax(
    presence: csr_array, labels: NDArray[np.int64], num_labels: int, penalty: float
) -> Regression:
    """Fit the probabilities of labels, p(k) proportional to exp(bias_k + sum of rewards_k).

    The rewards of each token sum to 0 over the labels, because the loss does not depend on their
    mean and the penalty is smallest there.
    """
    counts = np.bincount(labels, minlength=num_labels)
    biases = np.log(counts / len(labels))
    rows = np.arange(len(labels))

    def residuals(log_odds: Array) -> tuple[float, Array]:
        p = log_odds - log_odds.max(1, keepdims=True)
        loss = -p[rows, labels].sum(dtype=np.float64)
        np.exp(p, out=p)
        totals = p.sum(1, keepdims=True)
        loss += np.log(totals).sum(dtype=np.float64)
        p /= totals
        p[rows, labels] -= 1
        return float(loss), p

    problem = _Problem(presence.astype(np.float32), penalty, 1 / num_labels)
    options = {"ftol": SOFTMAX_TOLERANCE, "maxcor": SOFTMAX_MEMORY}
    return problem.minimize(biases, residuals, options)


class _Problem:
    """A regression whose parameters are scaled so that all gradients are about equally steep.

    `curvature` is the typical second derivative of a text's loss by its log-odds.
    """

    def __init__(self, presence: csr_array, penalty: float, curvature: float) -> None:
        num_texts, num_tokens = presence.shape
        texts = np.bincount(presence.indices, minlength=num_tokens)
        # A token in all texts has no information; half a text less keeps its precision finite.
        information = np.log(num_texts / np.minimum(texts, num_texts - 0.5))
        precision = np.maximum(UNIT_PRECISION * penalty / information**2, MIN_PRECISION)
        units = 1 / np.sqrt(curvature * texts + precision)
        dtype = presence.dtype
        self.bias_unit = dtype.type(1 / np.sqrt(curvature * num_texts))
        self.units = units[:, None]
        self.precision = (precision * units**2)[:, None].astype(dtype)
        self.presence = (presence @ diags_array(units)).astype(dtype)
        self.transposed = self.presence.T.tocsr()

    def minimize(
        self,
        biases: Array,
        residuals: Callable[[Array], tuple[float, Array]],
        options: dict[str, float],
    ) -> Regression:
        """Minimize the loss, starting from biases (K,) and rewards of 0, by L-BFGS.

        `residuals` returns the loss of log-odds (n, K), and its derivative by each.
        """
        num_labels, num_tokens = len(biases), self.presence.shape[1]

        def loss(point: Array) -> tuple[float, Array]:
            point = point.astype(self.presence.dtype)
            rewards = point[num_labels:].reshape(num_tokens, num_labels)
            log_odds = self.presence @ rewards + self.bias_unit * point[:num_labels]
            value, residual = residuals(log_odds)
            gradient = self.transposed @ residual
            penalty = self.precision * rewards
            value += 0.5 * float(np.vdot(penalty, rewards))
            gradient += penalty
            parts = [self.bias_unit * residual.sum(0), gradient.ravel()]
            return value, np.concatenate(parts).astype(np.float64)

        start = np.concatenate([biases / self.bias_unit, np.zeros(num_tokens * num_labels)])
        # BLAS threads slow down such short operations. Their limit is global to the process.
        with THREAD_LIMIT_LOCK, threadpool_limits(1, user_api="blas"):
            result = minimize(
                loss,
                start,
                jac=True,
                method="L-BFGS-B",
                options={"maxiter": MAX_ITERATIONS, **options},
            )
        rewards = result.x[num_labels:].reshape(num_tokens, num_labels) * self.units
        return Regression(result.x[:num_labels] * float(self.bias_unit), rewards)
