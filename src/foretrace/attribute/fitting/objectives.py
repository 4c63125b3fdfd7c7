"""The objectives of fitting: token costs that explain scores.

A weight is w(x) = exp(-cost(x)) with a cost of 0 or more, so that the log-probability of a text is
minus the sum of its tokens' costs: linear in the counts of its tokens.

Every token counts as seen, alone, in `penalty` further texts that have the attribute: one text is
then no reason to give a rare token an extreme weight.
"""

from threading import Lock
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, minimize
from scipy.sparse import csr_array, diags_array, eye_array, vstack
from threadpoolctl import threadpool_limits

Array = NDArray[np.float64]

LEAST_TARGET = 1e-4  # log-MSE asks for the logarithm of scores; one of 0 would outweigh all others
LEAST_CHANCE = 1e-6  # of not having the attribute: keeps slopes finite for texts without any cost
FIRST_COST = 0.01
SMALLEST_COEFFICIENT = 1e-3  # a product of less changes no probability by more than that
ITERATIONS = 100
ONE_AT_A_TIME = Lock()
TOLERANCE = 1e-6  # of the loss, relative: ranks no longer change


class Products(NamedTuple):
    """K products over M tokens, before those without a cost are dropped."""

    coefficients: Array  # (K,), positive, of sum 1
    costs: Array  # (K, M), 0 or more


def log_mse(counts: csr_array, targets: Array, penalty: float) -> Products:
    """Fit one product by least squares on log-probabilities: eq. (log_prob_classifier)."""
    from sklearn.linear_model import Lasso

    wanted = -np.log(np.maximum(targets, LEAST_TARGET))
    # scikit-learn divides the squares by the number of texts, and the penalty must keep up.
    model = Lasso(
        alpha=max(penalty, 1e-9) / len(targets),
        positive=True,
        fit_intercept=False,
        max_iter=10 * ITERATIONS,  # its own are far cheaper
        tol=1e-2,
    )
    model.fit(counts.tocsc(), wanted)
    return Products(np.ones(1), np.asarray(model.coef_, dtype=np.float64)[None])


def cross_entropy(
    counts: csr_array, targets: Array, penalty: float, terms: int, seed: int
) -> Products:
    """Fit a mixture of products, p = sum_k c_k prod_i w_k(x_i), by cross-entropy and L-BFGS-B.

    Products that the fit makes no use of are left out: there may be fewer than `terms`.
    """
    tokens = counts.shape[1]
    problem = _Problem(
        vstack([counts, eye_array(tokens)]).tocsr(),
        np.concatenate([targets, np.ones(tokens)]),
        np.concatenate([np.ones(len(targets)), np.full(tokens, penalty)]),
    )
    loss, single = problem.minimise(np.full((1, tokens), FIRST_COST))
    if terms == 1:
        return single
    # Equal products would stay equal: each starts from its own share of the costs of the one.
    shares = np.random.default_rng(seed).uniform(0.0, 2.0, (terms, tokens))
    lower, mixture = problem.minimise(shares * single.costs)
    if lower >= loss:
        return single
    kept = mixture.coefficients >= SMALLEST_COEFFICIENT
    coefficients = mixture.coefficients[kept]
    return Products(coefficients / coefficients.sum(), mixture.costs[kept])


class _Problem:
    """Texts, what they are to come to, and how much each counts.

    Slopes of frequent tokens are far steeper than those of rare ones. Costs are therefore searched
    in units of their own, by the fourth root of the frequency: the same costs in half the steps.
    """

    def __init__(self, counts: csr_array, targets: Array, importance: Array) -> None:
        self.units = np.bincount(counts.indices) ** -0.25
        self.counts = counts @ diags_array(self.units)  # of tokens, in units of their costs
        self.transposed = self.counts.T.tocsr()
        self.has, self.lacks = importance * targets, importance * (1 - targets)

    def minimise(self, costs: Array) -> tuple[float, Products]:
        """Find the least loss from these costs on: (K, M)."""
        terms, tokens = costs.shape
        start = np.concatenate([np.zeros(terms), (costs / self.units).ravel()])
        bounds = Bounds(np.concatenate([np.full(terms, -np.inf), np.zeros(costs.size)]))
        options = {"maxiter": ITERATIONS, "ftol": TOLERANCE}
        # Threads that wait for such short work slow it, and the limit is one for the process.
        with ONE_AT_A_TIME, threadpool_limits(1, user_api="blas"):
            found = minimize(
                lambda point: self.loss(point[:terms], point[terms:].reshape(terms, tokens)),
                start,
                jac=True,
                method="L-BFGS-B",
                bounds=bounds,
                options=options,
            )
        logits, best = found.x[:terms], found.x[terms:].reshape(terms, tokens)
        coefficients = np.exp(logits - _log_sum_exp(logits))
        return float(found.fun), Products(coefficients, best * self.units)

    def loss(self, logits: Array, costs: Array) -> tuple[float, Array]:
        """Give the loss and its slopes, at logits of the coefficients (K,) and costs (K, M)."""
        log_coefficients = logits - _log_sum_exp(logits)
        coefficients = np.exp(log_coefficients)
        totals = self.counts @ costs.T  # (n, K)
        joint = log_coefficients - totals
        log_p = _log_sum_exp(joint)
        share = np.exp(joint - log_p[:, None])  # of each product in p
        rest = np.maximum(-np.expm1(-totals) @ coefficients, LEAST_CHANCE)  # 1 - p
        loss = -(self.has @ log_p) - self.lacks @ np.log(rest)
        slope = self.has - self.lacks * np.exp(log_p) / rest  # of the loss in -log p
        of_logits = -(slope @ (share - coefficients))
        of_costs = (self.transposed @ (slope[:, None] * share)).T
        return loss, np.concatenate([of_logits, of_costs.ravel()])


def _log_sum_exp(values: Array) -> Array:
    """Sum over the last axis; scipy's own takes half of the time of a fit, for cases not met."""
    largest = values.max(-1, keepdims=True)
    return np.asarray(largest[..., 0] + np.log(np.exp(values - largest).sum(-1)))
