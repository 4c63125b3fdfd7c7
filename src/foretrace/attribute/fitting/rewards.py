"""Fit evidence, the rewards of tokens, by penalised logistic regression on token presence.

A token counts once per text. The reward of a token that occurs in n of N texts has a Gaussian
prior, whose standard deviation at a penalty of 1 is a tenth of the token's information,
log(N / n). Words that occur in most texts therefore stay almost neutral, and rare words that occur
with one label only count more.

The frequencies of tokens under the language model, if they are given, add the price of steering:
at strength 1 it is about half the mean square of the rewards of the next token. The penalty
N * PRICE_WEIGHT / 2 * sum_x p(x) v(x)^2 keeps rewards from tokens that the language model writes
often and that decide little, such as punctuation and function words.

The embeddings of tokens in the language model's head, if they are given, let similar tokens share a
reward: v(x) = w(x) + l . e(x), with w for what is particular to a token. Tokens that no text
contains have a reward, too. The two parts pay the price by themselves.

Texts that the language model wrote itself, if they are given with scores, are fitted in the same
way. They have the words that steering chooses among, and there may be many, because a classifier of
whole texts can score them. The two rewards of a token are added, at equal price.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.sparse import csr_array, diags_array

from foretrace.attribute.evidence import Evidence
from foretrace.attribute.fitting.candidate import Candidate, FitConfig, make_candidate, targets
from foretrace.attribute.fitting.examples import Array, Examples, Indices
from foretrace.attribute.fitting.products import minimize_by_lbfgs
from foretrace.attribute.transform import LogitAffine

MIN_REWARD = 0.05  # on sentiment, topics and roles, smaller rewards do not change the ranking
MIN_SHARE = 0.005  # of the largest reward; the limit of shared rewards, which are smaller
MAX_SHIFT = 100.0  # of the biases of labels
PRICE_WEIGHT = 10.0  # on sentiment, topics and toxicity: the best AUC, at a fifth of the price
UNIT_PRECISION = 100.0  # of a reward at penalty 1, per squared information of its token
MIN_PRECISION = 1e-6  # a penalty of 0 would let the rewards of separable texts grow without end
MAX_RATE = 0.999  # the start has a finite bias if almost all texts have the attribute
TOLERANCE = 1e-6  # of the loss, relative
SOFTMAX_TOLERANCE = 1e-4  # the ranking of 95 labels no longer changes
SOFTMAX_MEMORY = 5  # pairs of L-BFGS: each costs two copies of all rewards
WORD_PRECISION = 10.0  # of w, relative to a fit without embeddings: best AUC on sentiment
LEAST_VARIANCE = 3e-3  # of embeddings under the LM, added to each direction
LEAST_FREQUENCY = 1e-6  # tokens that are rarer, and in no text, have almost no reward


class LMData(NamedTuple):
    """What is known of a language model with V tokens."""

    frequencies: Array | None = None  # (V,): how often it writes each token
    embeddings: NDArray[np.float32] | None = None  # (V, k)
    samples: Examples | None = None  # texts that it wrote, with scores

    @property
    def facts(self) -> dict[str, bool]:
        """What the fit used, for its record."""
        return {
            "price_aware": self.frequencies is not None,
            "embeddings": self.embeddings is not None,
        }

    def price(self, rewards: Array) -> float:
        """Return twice the price of rewards (V,) at strength 1: their variance under the LM."""
        assert self.frequencies is not None
        weights = self.frequencies / self.frequencies.sum()
        return float(weights @ (rewards - weights @ rewards) ** 2)

    def whitened(self, counts: csr_array, keep: Sequence[int]) -> NDArray[np.float32] | None:
        """Return embeddings with a second moment of 1 under the LM, and 0 for tokens to keep.

        A coefficient of them then has the same price as a reward of 1 for every token.
        """
        if self.embeddings is None:
            return None
        frequencies = self.frequencies
        if frequencies is None:
            frequencies = np.asarray(counts.sum(0)).ravel()
        values = self.embeddings.copy()
        values[list(keep)] = 0.0
        weights = (frequencies / frequencies.sum()).astype(values.dtype)
        moment = (values * weights[:, None]).T @ values
        moment += LEAST_VARIANCE * np.eye(len(moment), dtype=values.dtype)
        variances, directions = np.linalg.eigh(moment)
        return np.asarray(values @ (directions / np.sqrt(variances)), dtype=np.float32)


NOTHING = LMData()


def fit_evidence(
    examples: Examples, held_out: Examples, config: FitConfig, lm: LMData = NOTHING
) -> Candidate:
    """Fit evidence to scores by logistic regression on token presence."""
    transform = config.transform or LogitAffine()
    design = Design.of(examples.counts, config, lm)
    fitted = logistic(design, targets(examples, transform), config.penalty)
    (evidence,) = design.evidence(fitted)
    predicted = _predict(evidence, held_out.counts)
    candidate = make_candidate(evidence, predicted, transform, examples, held_out, config)
    return candidate.with_facts(**lm.facts)


def add_samples(
    candidate: Candidate, examples: Examples, held_out: Examples, config: FitConfig, lm: LMData
) -> Candidate:
    """Add the rewards that the LM's own texts give, at equal price; fit scale and bias to texts."""
    if lm.samples is None:
        return candidate
    samples = lm.samples.without(config.keep)
    design = Design.of(samples.counts, config, lm)
    (other,) = design.evidence(logistic(design, samples.scores, config.penalty))
    vocab_size = examples.counts.shape[1]
    own, added = (one.dense(vocab_size).numpy() for one in (*candidate.evidence, other))
    prices = lm.price(own), lm.price(added)
    if not all(prices):
        return candidate
    rewards = own + np.sqrt(prices[0] / prices[1]) * added
    sums = _presence(examples.counts) @ rewards
    transform = config.transform or LogitAffine()
    scale = logistic(Design.of_sums(sums[:, None]), targets(examples, transform), config.penalty)
    rewards *= scale.coefficients[0, 0]
    share = None if lm.embeddings is None else MIN_SHARE
    evidence = _evidence(float(scale.biases[0]), np.arange(len(rewards)), rewards, share)
    predicted = _predict(evidence, held_out.counts)
    taught = make_candidate(evidence, predicted, transform, examples, held_out, config)
    return taught.with_facts(**lm.facts, samples=len(samples), auc_without_samples=candidate.auc)


def fit_labels(
    examples: Examples,
    held_out: Examples,
    num_labels: int,
    config: FitConfig,
    lm: LMData = NOTHING,
) -> list[Candidate]:
    """Fit one evidence per label, all labels against each other.

    A softmax gives rewards that sum to 0 over the labels. The reward of a label is the difference
    from the mean of all other labels. One constant is added to the biases of all labels, so that
    their probabilities sum to 1 for the average text. Each evidence therefore separates its label
    from the rest, and the log-odds of several rank the labels as the softmax does.
    """
    design = Design.of(examples.counts, config, lm)
    fitted = softmax(design, examples.strata, num_labels, config.penalty)
    scale = num_labels / (num_labels - 1)
    scaled = Regression(scale * fitted.biases, scale * fitted.coefficients)
    shift = _shift_to_one(design.log_odds(scaled))
    evidences = design.evidence(scaled._replace(biases=scaled.biases + shift))
    candidates = []
    for number, evidence in enumerate(evidences):
        predicted = _predict(evidence, held_out.counts)
        fitted_to, measured_on = (one.scored_by_label(number) for one in (examples, held_out))
        candidate = make_candidate(
            evidence, predicted, LogitAffine(), fitted_to, measured_on, config
        )
        candidates.append(candidate.with_facts(**lm.facts))
    return candidates


def _shift_to_one(log_odds: Array) -> float:
    """Return the constant to add to log-odds (n, K), so that their probabilities average 1 / K."""

    def excess(shift: float) -> float:
        probabilities = 0.5 * (1 + np.tanh(0.5 * (log_odds + shift)))
        return float(probabilities.mean() - 1 / log_odds.shape[1])

    return float(brentq(excess, -MAX_SHIFT, MAX_SHIFT, xtol=1e-6))


class Regression(NamedTuple):
    """Log-odds that are linear in the columns of a design: one label, or K of them."""

    biases: Array  # (K,)
    coefficients: Array  # (M + k, K)


@dataclass(frozen=True)
class Design:
    """What log-odds are linear in: the presence of M tokens, and k sums of embeddings.

    Attributes:
        tokens: The ids of the M tokens, ascending.
        presence: Which texts contain which of them, 1 or 0: (n, M).
        embeddings: Whitened embeddings of all V tokens, (V, k); k may be 0.
        sums: The sums of the embeddings of each text's tokens, (n, k).
        prices: The price of a squared coefficient, per text: (M + k,).
        shrinkage: The factor of l . e(x), for each token: (V,).
    """

    tokens: Indices
    presence: csr_array
    embeddings: NDArray[np.float32]
    sums: NDArray[np.float32]
    prices: Array
    shrinkage: Array

    @classmethod
    def of(cls, counts: csr_array, config: FitConfig, lm: LMData) -> "Design":
        """Make the design of texts."""
        texts = np.bincount(counts.indices, minlength=counts.shape[1])
        tokens = np.flatnonzero(texts >= config.min_texts)
        everything = _presence(counts)
        embeddings = lm.whitened(counts, config.keep)
        shrinkage = np.ones(counts.shape[1])
        prices = np.zeros(len(tokens))
        if lm.frequencies is not None:
            prices = PRICE_WEIGHT * lm.frequencies[tokens]
            unseen = lm.frequencies / (lm.frequencies + LEAST_FREQUENCY)
            shrinkage = np.where(texts >= config.min_texts, 1.0, unseen)
        if embeddings is None:
            embeddings = np.zeros((counts.shape[1], 0), dtype=np.float32)
        sums = everything.astype(np.float32) @ embeddings
        prices = np.append(prices, np.full(embeddings.shape[1], PRICE_WEIGHT))
        return cls(tokens, everything[:, tokens], embeddings, sums, prices, shrinkage)

    @classmethod
    def of_sums(cls, sums: NDArray[np.floating[Any]]) -> "Design":
        """Make a design of given columns (n, k), without tokens and prices."""
        none, count = np.zeros((0, sums.shape[1]), dtype=np.float32), np.zeros(0)
        presence = csr_array((len(sums), 0))
        return cls(count.astype(int), presence, none, sums, np.zeros(sums.shape[1]), count)

    @property
    def word_precision(self) -> float:
        """The precision of the rewards of single tokens at penalty 1, per squared information."""
        return UNIT_PRECISION * (WORD_PRECISION if self.sums.shape[1] else 1.0)

    def log_odds(self, fitted: Regression) -> Array:
        """Compute the log-odds of the texts, (n, K)."""
        own, shared = np.split(fitted.coefficients, [len(self.tokens)])
        return np.asarray(self.presence @ own + self.sums @ shared + fitted.biases)

    def evidence(self, fitted: Regression) -> list[Evidence]:
        """Return the evidence of each label. With embeddings, all tokens have a reward."""
        own, shared = np.split(fitted.coefficients, [len(self.tokens)])
        tokens, rewards = self.tokens, own
        if len(shared):
            tokens = np.arange(len(self.embeddings))
            rewards = (self.embeddings @ shared) * self.shrinkage[:, None]
            rewards[self.tokens] += own
        return [
            _evidence(float(bias), tokens, column, MIN_SHARE if len(shared) else None)
            for bias, column in zip(fitted.biases, rewards.T, strict=True)
        ]


def _presence(counts: csr_array) -> csr_array:
    """Return which texts contain which tokens, 1 or 0."""
    presence = counts.copy()
    presence.data = np.ones_like(presence.data)
    return presence


def _evidence(bias: float, tokens: Indices, rewards: Array, share: float | None) -> Evidence:
    """Return evidence without rewards below MIN_REWARD, or below a share of the largest."""
    sizes = np.abs(rewards)
    kept = sizes >= (MIN_REWARD if share is None else min(MIN_REWARD, share * sizes.max()))
    # Rounded, so that files may hold them in 16 bits.
    values = torch.from_numpy(rewards[kept]).half().float()
    return Evidence(bias, torch.from_numpy(tokens[kept]).to(torch.int32), values)


def _predict(evidence: Evidence, counts: csr_array) -> Array:
    """Return the probability of each text."""
    presence = counts[:, evidence.tokens.numpy()]
    presence.data = np.ones_like(presence.data)
    log_odds = presence @ evidence.rewards.double().numpy() + evidence.bias
    return np.asarray(0.5 * (1 + np.tanh(0.5 * log_odds)))


def logistic(design: Design, targets: Array, penalty: float) -> Regression:
    """Fit sigma(bias + sum of rewards) to targets in [0, 1] by cross-entropy."""
    rate = float(np.clip(targets.mean(), 1 - MAX_RATE, MAX_RATE))
    bias = np.log(rate) - np.log1p(-rate)

    def residuals(log_odds: Array) -> tuple[float, Array]:
        z = log_odds[:, 0]
        loss = np.logaddexp(0, z).sum() - targets @ z
        return float(loss), (0.5 * (1 + np.tanh(0.5 * z)) - targets)[:, None]

    problem = _Problem(design, penalty, 0.25, np.float64)
    return problem.minimize(np.array([bias]), residuals, {"ftol": TOLERANCE})


def softmax(design: Design, labels: Indices, num_labels: int, penalty: float) -> Regression:
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

    problem = _Problem(design, penalty, 1 / num_labels, np.float32)
    options = {"ftol": SOFTMAX_TOLERANCE, "maxcor": SOFTMAX_MEMORY}
    return problem.minimize(biases, residuals, options)


class _Problem:
    """A regression whose parameters are scaled so that all gradients are about equally steep.

    `curvature` is the typical second derivative of a text's loss by its log-odds.
    """

    def __init__(
        self, design: Design, penalty: float, curvature: float, dtype: type[np.floating[Any]]
    ) -> None:
        num_texts, self.num_tokens = design.presence.shape
        texts = np.bincount(design.presence.indices, minlength=self.num_tokens)
        # A token in all texts has no information; half a text less keeps its precision finite.
        information = np.log(num_texts / np.minimum(texts, num_texts - 0.5))
        prior = num_texts * design.prices
        prior[: self.num_tokens] += design.word_precision / information**2
        precision = np.maximum(penalty * prior, MIN_PRECISION)
        squares = np.append(texts, np.square(design.sums, dtype=np.float64).sum(0))
        units = 1 / np.sqrt(curvature * squares + precision)
        self.dtype, self.units = dtype, units[:, None]
        self.bias_unit = dtype(1 / np.sqrt(curvature * num_texts))
        self.precision = (precision * units**2)[:, None].astype(dtype)
        own, shared = np.split(units, [self.num_tokens])
        self.presence = (design.presence @ diags_array(own)).astype(dtype)
        self.transposed = self.presence.T.tocsr()
        self.sums = (design.sums * shared).astype(dtype)

    def minimize(
        self,
        biases: Array,
        residuals: Callable[[Array], tuple[float, Array]],
        options: dict[str, float],
    ) -> Regression:
        """Minimize the loss, starting from biases (K,) and coefficients of 0, by L-BFGS.

        `residuals` returns the loss of log-odds (n, K), and its derivative by each.
        """
        shape = len(self.units), len(biases)

        def loss(point: Array) -> tuple[float, Array]:
            point = point.astype(self.dtype)
            offsets = self.bias_unit * point[: len(biases)]
            values = point[len(biases) :].reshape(shape)
            own, shared = np.split(values, [self.num_tokens])
            value, residual = residuals(self.presence @ own + self.sums @ shared + offsets)
            penalty = self.precision * values
            value += 0.5 * float(np.vdot(penalty, values))
            gradient = np.concatenate([self.transposed @ residual, self.sums.T @ residual])
            parts = [self.bias_unit * residual.sum(0), (gradient + penalty).ravel()]
            return value, np.concatenate(parts).astype(np.float64)

        start = np.concatenate([biases / self.bias_unit, np.zeros(shape[0] * shape[1])])
        result = minimize_by_lbfgs(loss, start, options)
        coefficients = result.x[len(biases) :].reshape(shape) * self.units
        return Regression(result.x[: len(biases)] * float(self.bias_unit), coefficients)
