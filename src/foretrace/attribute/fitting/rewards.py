"""Fit evidence, the rewards of tokens, by penalised logistic regression on token presence.

A token counts once per text. The reward of a token that occurs in n of N texts has a Gaussian
prior, whose standard deviation at a penalty of 1 is a tenth of the token's information,
log(N / n). Words that occur in most texts therefore stay almost neutral, and rare words that occur
with one label only count more.

The frequencies of tokens under the language model, if they are given, add the price of steering:
at strength 1 it is about half the mean square of the rewards of the next token. The penalty
N * PRICE_WEIGHT / 2 * sum_x p(x) v(x)^2 keeps rewards from tokens that the language model writes
often and that decide little, such as punctuation and function words.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.sparse import csr_array, diags_array

from foretrace.attribute.evidence import Evidence
from foretrace.attribute.fitting.candidate import Candidate, FitConfig, make_candidate, targets
from foretrace.attribute.fitting.examples import Array, Examples, Indices
from foretrace.attribute.fitting.products import minimize_by_lbfgs
from foretrace.attribute.transform import LogitAffine

MIN_REWARD = 0.05  # on sentiment, topics and roles, smaller rewards do not change the ranking
MAX_SHIFT = 100.0  # of the biases of labels
PRICE_WEIGHT = 10.0  # on sentiment, topics and toxicity: the best AUC, at a fifth of the price
UNIT_PRECISION = 100.0  # of a reward at penalty 1, per squared information of its token
MIN_PRECISION = 1e-6  # a penalty of 0 would let the rewards of separable texts grow without end
MAX_RATE = 0.999  # the start has a finite bias if almost all texts have the attribute
TOLERANCE = 1e-6  # of the loss, relative
SOFTMAX_TOLERANCE = 1e-4  # the ranking of 95 labels no longer changes
SOFTMAX_MEMORY = 5  # pairs of L-BFGS: each costs two copies of all rewards


def fit_evidence(
    examples: Examples, held_out: Examples, config: FitConfig, frequencies: Array | None = None
) -> Candidate:
    """Fit evidence to scores by logistic regression on token presence."""
    transform = config.transform or LogitAffine()
    presence, tokens = _presence(examples.counts, config.min_texts)
    wanted = targets(examples, transform)
    fitted = logistic(presence, wanted, config.penalty, _prices(frequencies, tokens))
    evidence = _evidence(float(fitted.biases[0]), tokens, fitted.rewards[:, 0])
    predicted = _predict(evidence, held_out.counts)
    candidate = make_candidate(evidence, predicted, transform, examples, held_out, config)
    return candidate.with_facts(price_aware=frequencies is not None)


def fit_labels(
    examples: Examples,
    held_out: Examples,
    num_labels: int,
    config: FitConfig,
    frequencies: Array | None = None,
) -> list[Candidate]:
    """Fit one evidence per label, all labels against each other.

    A softmax gives rewards that sum to 0 over the labels. The reward of a label is the difference
    from the mean of all other labels. One constant is added to the biases of all labels, so that
    their probabilities sum to 1 for the average text. Each evidence therefore separates its label
    from the rest, and the log-odds of several rank the labels as the softmax does.
    """
    presence, tokens = _presence(examples.counts, config.min_texts)
    prices = _prices(frequencies, tokens)
    fitted = softmax(presence, examples.strata, num_labels, config.penalty, prices)
    scale = num_labels / (num_labels - 1)
    rewards = scale * fitted.rewards
    rewards[np.abs(rewards) < MIN_REWARD] = 0.0
    biases = scale * fitted.biases
    biases = biases + _shift_to_one(presence @ rewards + biases)
    candidates = []
    for number in range(num_labels):
        evidence = _evidence(float(biases[number]), tokens, rewards[:, number])
        predicted = _predict(evidence, held_out.counts)
        fitted_to, measured_on = (one.scored_by_label(number) for one in (examples, held_out))
        candidate = make_candidate(
            evidence, predicted, LogitAffine(), fitted_to, measured_on, config
        )
        candidates.append(candidate.with_facts(price_aware=frequencies is not None))
    return candidates


def _prices(frequencies: Array | None, tokens: Indices) -> Array:
    """Return the price of a reward per squared reward and text, for each token."""
    if frequencies is None:
        return np.zeros(len(tokens))
    return PRICE_WEIGHT * frequencies[tokens]


def _shift_to_one(log_odds: Array) -> float:
    """Return the constant to add to log-odds (n, K), so that their probabilities average 1 / K."""

    def excess(shift: float) -> float:
        probabilities = 0.5 * (1 + np.tanh(0.5 * (log_odds + shift)))
        return float(probabilities.mean() - 1 / log_odds.shape[1])

    return float(brentq(excess, -MAX_SHIFT, MAX_SHIFT, xtol=1e-6))


def _presence(counts: csr_array, min_texts: int) -> tuple[csr_array, Indices]:
    """Return which texts contain which tokens, 1 or 0, and the ids of these tokens."""
    texts = np.bincount(counts.indices, minlength=counts.shape[1])
    tokens = np.flatnonzero(texts >= min_texts)
    presence = counts[:, tokens]
    presence.data = np.ones_like(presence.data)
    return presence, tokens


def _evidence(bias: float, tokens: Indices, rewards: Array) -> Evidence:
    kept = np.abs(rewards) >= MIN_REWARD
    return Evidence(
        bias,
        torch.from_numpy(tokens[kept]).to(torch.int32),
        torch.from_numpy(rewards[kept]).float(),
    )


def _predict(evidence: Evidence, counts: csr_array) -> Array:
    """Return the probability of each text."""
    presence = counts[:, evidence.tokens.numpy()]
    presence.data = np.ones_like(presence.data)
    log_odds = presence @ evidence.rewards.double().numpy() + evidence.bias
    return np.asarray(0.5 * (1 + np.tanh(0.5 * log_odds)))


class Regression(NamedTuple):
    """Log-odds that are linear in the presence of M tokens: one column per label, or one alone."""

    biases: Array  # (K,)
    rewards: Array  # (M, K)


def logistic(presence: csr_array, targets: Array, penalty: float, prices: Array) -> Regression:
    """Fit sigma(bias + sum of rewards) to targets in [0, 1] by cross-entropy."""
    rate = float(np.clip(targets.mean(), 1 - MAX_RATE, MAX_RATE))
    bias = np.log(rate) - np.log1p(-rate)

    def residuals(log_odds: Array) -> tuple[float, Array]:
        z = log_odds[:, 0]
        loss = np.logaddexp(0, z).sum() - targets @ z
        return float(loss), (0.5 * (1 + np.tanh(0.5 * z)) - targets)[:, None]

    problem = _Problem(presence, penalty, prices, 0.25)
    return problem.minimize(np.array([bias]), residuals, {"ftol": TOLERANCE})


def softmax(
    presence: csr_array, labels: Indices, num_labels: int, penalty: float, prices: Array
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

    problem = _Problem(presence.astype(np.float32), penalty, prices, 1 / num_labels)
    options = {"ftol": SOFTMAX_TOLERANCE, "maxcor": SOFTMAX_MEMORY}
    return problem.minimize(biases, residuals, options)


class _Problem:
    """A regression whose parameters are scaled so that all gradients are about equally steep.

    `curvature` is the typical second derivative of a text's loss by its log-odds.
    """

    def __init__(
        self, presence: csr_array, penalty: float, prices: Array, curvature: float
    ) -> None:
        num_texts, num_tokens = presence.shape
        texts = np.bincount(presence.indices, minlength=num_tokens)
        # A token in all texts has no information; half a text less keeps its precision finite.
        information = np.log(num_texts / np.minimum(texts, num_texts - 0.5))
        prior = UNIT_PRECISION / information**2 + num_texts * prices
        precision = np.maximum(penalty * prior, MIN_PRECISION)
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
        result = minimize_by_lbfgs(loss, start, options)
        rewards = result.x[num_labels:].reshape(num_tokens, num_labels) * self.units
        return Regression(result.x[:num_labels] * float(self.bias_unit), rewards)
