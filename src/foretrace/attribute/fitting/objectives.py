"""The objectives of a fit: find token costs that explain the scores of texts.

A weight is w(x) = exp(-cost(x)) with a cost of at least 0. The log-probability of a text is minus
the sum of its tokens' costs. It is linear in its token counts.

The penalty is a pseudocount. For every token it adds `penalty` texts that consist of this token and
have the attribute. It prevents a rare token from getting an extreme weight from a single text.
"""

from threading import Lock
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, minimize
from scipy.sparse import csr_array, diags_array, eye_array, vstack
from threadpoolctl import threadpool_limits

Array = NDArray[np.float64]

MIN_TARGET = 1e-4  # log-MSE uses log scores; a score of 0 would outweigh all others
MIN_COMPLEMENT = 1e-6  # of 1 - p: keeps gradients finite for texts without cost
INITIAL_COST = 0.01
MIN_COEFFICIENT = 1e-3  # a product with less changes no probability by more than that
MAX_ITERATIONS = 100
THREAD_LIMIT_LOCK = Lock()
TOLERANCE = 1e-6  # of the loss, relative: the ranking no longer changes


class Mixture(NamedTuple):
    """A mixture of K products over M tokens, before tokens without cost are dropped."""

    coefficients: Array  # (K,), positive, with sum 1
    costs: Array  # (K, M), at least 0


def log_mse(counts: csr_array, targets: Array, penalty: float) -> Mixture:
    """Fit one product by least squares on log-probabilities: eq. (log_prob_classifier)."""
    from sklearn.linear_model import Lasso

    wanted = -np.log(np.maximum(targets, MIN_TARGET))
    # scikit-learn divides the squared error by the number of texts, but not the penalty.
    model = Lasso(
        alpha=max(penalty, 1e-9) / len(targets),
        positive=True,
        fit_intercept=False,
        max_iter=10 * MAX_ITERATIONS,  # an iteration is far cheaper than one of L-BFGS-B
        tol=1e-2,
    )
    model.fit(counts.tocsc(), wanted)
    return Mixture(np.ones(1), np.asarray(model.coef_, dtype=np.float64)[None])


def cross_entropy(
    counts: csr_array, targets: Array, penalty: float, terms: int, seed: int
) -> Mixture:
    """Fit a mixture of products, p = sum_k c_k prod_i w_k(x_i), by cross-entropy and L-BFGS-B.

    Products that the fit does not use are dropped: the result may have fewer than `terms`.
    """
    tokens = counts.shape[1]
    problem = _CrossEntropy(
        vstack([counts, eye_array(tokens)]).tocsr(),
        np.concatenate([targets, np.ones(tokens)]),
        np.concatenate([np.ones(len(targets)), np.full(tokens, penalty)]),
    )
    loss, single = problem.minimize(np.full((1, tokens), INITIAL_COST))
    if terms == 1:
        return single
    # Equal products would stay equal: each starts from random multiples of the single costs.
    factors = np.random.default_rng(seed).uniform(0.0, 2.0, (terms, tokens))
    mixture_loss, mixture = problem.minimize(factors * single.costs)
    if mixture_loss >= loss:
        return single
    kept = mixture.coefficients >= MIN_COEFFICIENT
    coefficients = mixture.coefficients[kept]
    return Mixture(coefficients / coefficients.sum(), mixture.costs[kept])


class _CrossEntropy:
    """The cross-entropy between targets and a mixture, with a weight for each text.

    Gradients of frequent tokens are far steeper than those of rare ones. Costs are therefore scaled
    by the fourth root of the token's frequency, which halves the number of iterations.
    """

    def __init__(self, counts: csr_array, targets: Array, text_weights: Array) -> None:
        self.units = np.bincount(counts.indices) ** -0.25
        self.counts = counts @ diags_array(self.units)
        self.transposed = self.counts.T.tocsr()
        self.positive = text_weights * targets
        self.negative = text_weights * (1 - targets)

    def minimize(self, costs: Array) -> tuple[float, Mixture]:
        """Minimize the loss, starting from these costs (K, M)."""
        terms, tokens = costs.shape
        start = np.concatenate([np.zeros(terms), (costs / self.units).ravel()])
        bounds = Bounds(np.concatenate([np.full(terms, -np.inf), np.zeros(costs.size)]))
        options = {"maxiter": MAX_ITERATIONS, "ftol": TOLERANCE}
        # BLAS threads slow down such short operations. Their limit is global to the process.
        with THREAD_LIMIT_LOCK, threadpool_limits(1, user_api="blas"):
            result = minimize(
                lambda point: self.loss(point[:terms], point[terms:].reshape(terms, tokens)),
                start,
                jac=True,
                method="L-BFGS-B",
                bounds=bounds,
                options=options,
            )
        logits, best = result.x[:terms], result.x[terms:].reshape(terms, tokens)
        coefficients = np.exp(logits - _log_sum_exp(logits))
        return float(result.fun), Mixture(coefficients, best * self.units)

    def loss(self, logits: Array, costs: Array) -> tuple[float, Array]:
        """Compute the loss and its gradient at coefficient logits (K,) and costs (K, M)."""
        log_coefficients = logits - _log_sum_exp(logits)
        coefficients = np.exp(log_coefficients)
        totals = self.counts @ costs.T  # (n, K)
        joint = log_coefficients - totals
        log_p = _log_sum_exp(joint)
        posterior = np.exp(joint - log_p[:, None])  # of each product, given the text
        complement = np.maximum(-np.expm1(-totals) @ coefficients, MIN_COMPLEMENT)  # 1 - p
        loss = -(self.positive @ log_p) - self.negative @ np.log(complement)
        slope = self.positive - self.negative * np.exp(log_p) / complement  # d loss / d(-log p)
        logit_gradient = -(slope @ (posterior - coefficients))
        cost_gradient = (self.transposed @ (slope[:, None] * posterior)).T
        return loss, np.concatenate([logit_gradient, cost_gradient.ravel()])


def _log_sum_exp(values: Array) -> Array:
    """Compute log-sum-exp over the last axis, faster than scipy, which would dominate a fit."""
    largest = values.max(-1, keepdims=True)
    return np.asarray(largest[..., 0] + np.log(np.exp(values - largest).sum(-1)))
