"""Fit products of token weights to scored texts.

A weight is w(x) = exp(-cost(x)) with a cost of at least 0. The log-probability of a text is minus
the sum of its tokens' costs. It is linear in its token counts.

The penalty is a pseudocount. For every token it adds `penalty` texts that consist of this token and
have the attribute. It prevents a rare token from getting an extreme weight from a single text.
"""

from collections.abc import Callable
from threading import Lock
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import Bounds, OptimizeResult, minimize
from scipy.sparse import csr_array, diags_array, eye_array, vstack
from threadpoolctl import threadpool_limits

from foretrace.attribute.fitting.candidate import Candidate, FitConfig, make_candidate, targets
from foretrace.attribute.fitting.examples import Array, Examples
from foretrace.attribute.terms import Terms
from foretrace.attribute.transform import LogitAffine

# The identity comes first: another transform must rank held-out texts clearly better.
TRANSFORMS = (LogitAffine(), LogitAffine(2.0, 0.0), LogitAffine(3.0, -3.0))
MIN_AUC_GAIN = 0.005  # less is within chance for some thousands of texts
MIN_COST = 1e-4  # a hundred tokens with less change a probability by less than one percent
MIN_TARGET = 1e-4  # log-MSE uses log scores; a score of 0 would outweigh all others
MIN_ONE_MINUS = 1e-6  # of 1 - p: keeps gradients finite for texts without cost
INITIAL_COST = 0.01
MIN_COEFFICIENT = 1e-3  # a product with less changes no probability by more than that
MAX_ITERATIONS = 100
THREAD_LIMIT_LOCK = Lock()
TOLERANCE = 1e-6  # of the loss, relative: the ranking no longer changes


def fit_products(
    examples: Examples, held_out: Examples, config: FitConfig, *, by_absence: bool = False
) -> Candidate:
    """Fit a product, or a mixture of products; choose the transform on the held-out texts.

    `by_absence` fits the absence of the attribute, and negates the result. This suits attributes
    that single tokens reveal, such as a topic or a role. The paper recommends it for rare ones.
    """
    transforms = TRANSFORMS if config.transform is None else (config.transform,)
    if ((examples.scores == 0) | (examples.scores == 1)).all():
        transforms = transforms[:1]  # a transform changes neither 0 nor 1
    best = None
    for transform in transforms:
        wanted = targets(examples, transform, by_absence)
        terms = _fit_terms(examples.counts, 1 - wanted if by_absence else wanted, config)
        terms = terms.negated() if by_absence else terms
        counts = held_out.counts[:, terms.tokens.numpy()]
        sums = torch.from_numpy(counts @ terms.log_weights.double().numpy().T)
        predicted = terms.probability(sums).numpy()
        candidate = make_candidate(
            terms, predicted, transform, examples, held_out, config, by_absence=by_absence
        )
        if best is None or (candidate.auc or 0.0) > (best.auc or 0.0) + MIN_AUC_GAIN:
            best = candidate
    assert best is not None
    return best


def _fit_terms(counts: csr_array, wanted: Array, config: FitConfig) -> Terms:
    """Fit products to targets, over the tokens that can get a weight below 1.

    These are the tokens of which some text with a target below 1 has one.
    """
    texts = np.bincount(counts.indices, minlength=counts.shape[1])
    lacking = np.bincount(counts[wanted < 1].indices, minlength=counts.shape[1])
    tokens = np.flatnonzero((texts >= config.min_texts) & (lacking > 0))
    counts = counts[:, tokens]
    if not len(tokens):
        return Terms.one()
    if config.objective == "log-mse":
        mixture = log_mse(counts, wanted, config.penalty)
    else:
        mixture = cross_entropy(counts, wanted, config.penalty, config.terms, config.seed)
    kept = (mixture.costs >= MIN_COST).any(0)
    return Terms(
        torch.from_numpy(mixture.coefficients),
        torch.from_numpy(tokens[kept]).to(torch.int32),
        -torch.from_numpy(mixture.costs[:, kept]).float(),
    )


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

    The loss is far steeper in the costs of frequent tokens. Costs are scaled by the fourth
    root of the token's frequency, which halves the number of iterations.
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
        result = minimize_by_lbfgs(
            lambda point: self.loss(point[:terms], point[terms:].reshape(terms, tokens)),
            start,
            {"ftol": TOLERANCE},
            bounds,
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
        one_minus = np.maximum(-np.expm1(-totals) @ coefficients, MIN_ONE_MINUS)  # 1 - p
        loss = -(self.positive @ log_p) - self.negative @ np.log(one_minus)
        slope = self.positive - self.negative * np.exp(log_p) / one_minus  # d loss / d(-log p)
        logit_gradient = -(slope @ (posterior - coefficients))
        cost_gradient = (self.transposed @ (slope[:, None] * posterior)).T
        return loss, np.concatenate([logit_gradient, cost_gradient.ravel()])


def minimize_by_lbfgs(
    loss: Callable[[Array], tuple[float, Array]],
    start: Array,
    options: dict[str, float],
    bounds: Bounds | None = None,
) -> OptimizeResult:
    """Minimize a loss with a gradient, in a single thread.

    BLAS threads slow down such short operations. Their limit is global to the process.
    """
    options = {"maxiter": MAX_ITERATIONS, **options}
    with THREAD_LIMIT_LOCK, threadpool_limits(1, user_api="blas"):
        return minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)


def _log_sum_exp(values: Array) -> Array:
    """Compute log-sum-exp over the last axis, faster than scipy, which would dominate a fit."""
    largest = values.max(-1, keepdims=True)
    return np.asarray(largest[..., 0] + np.log(np.exp(values - largest).sum(-1)))
