"""Metrics of generated texts, with confidence intervals over prompts.

A metric takes a list for each prompt, with the score or the text of each of its continuations, and
returns a measurement. Metrics follow DExperts. They drop continuations that could not be judged or
measured, and count them.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import exp
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretrace.engines.cleaning import LETTER, split_words
from foretrace.errors import InvalidInputError

Scores = Sequence[Sequence[float | None]]
"""A list for each prompt with a score for each continuation; None where judging failed."""
Floats = NDArray[np.float64]

THRESHOLD = 0.5  # a continuation with a score above it has the attribute
MAX_PERPLEXITY = 10_000.0  # continuations at or above it are dropped, as the field does
NUM_RESAMPLES = 2_000
MIN_FINITE_SHARE = 0.99  # of resampled values, below which there is no interval
MIN_COMPARABLE_SHARE = 0.975  # of resamples in which a curve reaches down to a rival's cost


@dataclass(frozen=True, eq=False)
class Measurement:
    """A metric as a ratio of two sums over prompts: sum of totals / sum of counts.

    Keeping the contribution of each prompt makes it possible to resample prompts.

    Attributes:
        totals: The numerator of each prompt, of shape (prompts,).
        counts: The denominator of each prompt, of shape (prompts,). It is 0 where nothing could be
            measured.
        dropped: The number of continuations that were left out.

    Example:
        >>> import numpy as np
        >>> from foretrace.evaluate.metrics import Measurement
        >>> Measurement(np.array([1.0, 3.0]), np.array([2.0, 2.0])).value
        1.0
    """

    totals: Floats
    counts: Floats
    dropped: int = 0

    @property
    def value(self) -> float:
        """The metric; NaN if nothing could be measured."""
        return _ratio(self.totals.sum(), self.counts.sum())


class Interval(NamedTuple):
    """A value with its 95% confidence interval."""

    value: float
    low: float
    high: float


class Change(NamedTuple):
    """The change of a metric against a baseline on the same prompts."""

    difference: Interval
    relative: Interval


class Point(NamedTuple):
    """A method on a trade-off curve: its metric and what it costs, such as its perplexity."""

    metric: Measurement
    cost: Measurement


def average_maximum(scores: Scores) -> Measurement:
    """Compute the mean over prompts of the greatest score among a prompt's continuations.

    Prompts without any score are left out.

    Example:
        >>> from foretrace.evaluate.metrics import average_maximum
        >>> average_maximum([[0.25, 0.75], [0.5, None]]).value
        0.625
    """
    maxima = [max(prompt_scores, default=None) for prompt_scores in _without_failures(scores)]
    return _mean_over_prompts(maxima, _count_failures(scores))


def probability_of_any(scores: Scores, threshold: float = THRESHOLD) -> Measurement:
    """Compute the share of prompts with at least one continuation above a threshold.

    Prompts without any score are left out.

    Example:
        >>> from foretrace.evaluate.metrics import probability_of_any
        >>> probability_of_any([[0.25, 0.75], [0.5, None]]).value
        0.5
    """
    exceeded = [
        float(max(prompt_scores) > threshold) if prompt_scores else None
        for prompt_scores in _without_failures(scores)
    ]
    return _mean_over_prompts(exceeded, _count_failures(scores))


def mean_score(scores: Scores) -> Measurement:
    """Compute the mean score over all continuations.

    Example:
        >>> from foretrace.evaluate.metrics import mean_score
        >>> mean_score([[0.25, 0.75], [0.5, None]]).value
        0.5
    """
    judged = _without_failures(scores)
    return _measurement(
        [sum(prompt_scores) for prompt_scores in judged],
        [len(prompt_scores) for prompt_scores in judged],
        _count_failures(scores),
    )


def distinct(texts: Sequence[Sequence[str]], n: int) -> Measurement:
    """Compute dist-n: the distinct n-grams of a prompt's continuations, divided by their words.

    It is the mean over prompts; blank continuations are dropped.

    Example:
        >>> from foretrace.evaluate.metrics import distinct
        >>> distinct([["a b a b"]], 2).value  # "a b" and "b a", of 4 words
        0.5
    """
    shares: list[float | None] = []
    for prompt_texts in texts:
        split_texts = [text.split(" ") for text in prompt_texts if text.strip()]
        ngrams = {ngram for text_words in split_texts for ngram in _ngrams(text_words, n)}
        shares.append(len(ngrams) / sum(map(len, split_texts)) if split_texts else None)
    num_blank = sum(not text.strip() for prompt_texts in texts for text in prompt_texts)
    return _mean_over_prompts(shares, num_blank)


def perplexity(losses: Scores) -> Measurement:
    """Compute the mean perplexity of continuations.

    The loss of a continuation is its mean negative log-likelihood per token, in nats. Continuations
    without tokens (None), and those with a perplexity of 10,000 or more, are dropped.

    Example:
        >>> from foretrace.evaluate.metrics import perplexity
        >>> perplexity([[0.0, None, 1000.0]]).value
        1.0
    """
    kept = [
        [value for loss in prompt_losses if (value := exp(min(loss, 100.0))) < MAX_PERPLEXITY]
        for prompt_losses in _without_failures(losses)
    ]
    dropped = sum(map(len, losses)) - sum(map(len, kept))
    return _measurement([sum(values) for values in kept], [len(values) for values in kept], dropped)


def words(texts: Sequence[Sequence[str]]) -> Measurement:
    """Compute the mean number of words of a continuation.

    A method can reach a goal by stopping early, which no other metric shows.

    Example:
        >>> from foretrace.evaluate.metrics import words
        >>> words([["one two three", ""]]).value
        1.5
    """
    return mean_score([[float(len(split_words(text))) for text in row] for row in texts])


def blank(texts: Sequence[Sequence[str]]) -> Measurement:
    """Compute the share of continuations without any word.

    Example:
        >>> from foretrace.evaluate.metrics import blank
        >>> blank([["one two three", " "]]).value
        0.5
    """
    return mean_score([[float(not text.strip()) for text in row] for row in texts])


def price(prices: Sequence[Sequence[float]], tokens: Sequence[Sequence[int]]) -> Measurement:
    """Compute the mean price of a token: the prices of continuations, weighed by their tokens.

    Example:
        >>> from foretrace.evaluate.metrics import price
        >>> price([[0.5, 0.0]], [[1, 3]]).value
        0.125
    """
    return _measurement(
        [float(np.dot(*pair)) for pair in zip(prices, tokens, strict=True)],
        [sum(counts) for counts in tokens],
    )


def letters(texts: Sequence[Sequence[str]]) -> Measurement:
    """Compute the share of letters among all characters but white space.

    Steering can lead to digits and symbols, which few judges object to.

    Example:
        >>> from foretrace.evaluate.metrics import letters
        >>> letters([["in 19", "ab"]]).value
        0.6666666666666666
    """
    visible = ["".join("".join(prompt_texts).split()) for prompt_texts in texts]
    return _measurement(
        [sum(character.isalpha() for character in characters) for characters in visible],
        [len(characters) for characters in visible],
    )


def repetition(texts: Sequence[Sequence[str]], n: int = 4) -> Measurement:
    """Compute the share of n-grams of words that occurred before in the same continuation.

    Example:
        >>> from foretrace.evaluate.metrics import repetition
        >>> repetition([["a b a b a", "c d e"]], n=2).value
        0.3333333333333333
    """
    ngrams = [[_ngrams(split_words(text), n) for text in prompt_texts] for prompt_texts in texts]
    return _measurement(
        [sum(len(one) - len(set(one)) for one in prompt_ngrams) for prompt_ngrams in ngrams],
        [sum(map(len, prompt_ngrams)) for prompt_ngrams in ngrams],
    )


def _ngrams(text_words: Sequence[str], n: int) -> list[tuple[str, ...]]:
    return [tuple(text_words[i : i + n]) for i in range(len(text_words) - n + 1)]


def term_frequency(texts: Sequence[Sequence[str]], terms: Sequence[str]) -> Measurement:
    """Count how often words and phrases occur in 1,000 words, in upper or lower case.

    Example:
        >>> from foretrace.evaluate.metrics import term_frequency
        >>> term_frequency([["Women vote", "a woman"]], ["women"]).value
        250.0
    """
    longest_first = sorted(map(re.escape, terms), key=len, reverse=True)
    pattern = re.compile(rf"(?<!{LETTER})(?:{'|'.join(longest_first)})(?!{LETTER})", re.IGNORECASE)
    return _measurement(
        [1000 * sum(len(pattern.findall(text)) for text in row) for row in texts],
        [sum(len(split_words(text)) for text in row) for row in texts],
    )


def interval(measurement: Measurement, seed: int = 0) -> Interval:
    """Compute the 95% confidence interval of a metric by resampling prompts.

    The bounds are NaN where nothing could be measured.

    Example:
        >>> from foretrace.evaluate.metrics import interval, mean_score
        >>> interval(mean_score([[0.5], [0.5]]))
        Interval(value=0.5, low=0.5, high=0.5)
    """
    samples = _resample_prompts(len(measurement.totals), seed)
    return _interval(measurement.value, _resampled(measurement, samples))


def change(measurement: Measurement, baseline: Measurement, seed: int = 0) -> Change:
    """Compare a metric with a baseline's on the prompts that both measured.

    The prompts of both are resampled together. The bounds of the relative change are NaN where the
    baseline is 0 in more than 1% of the resamples.

    Raises:
        InvalidInputError: If the two were measured on different numbers of prompts.

    Example:
        >>> from foretrace.evaluate.metrics import change, mean_score
        >>> change(mean_score([[0.25], [0.5]]), mean_score([[0.5], [1.0]])).relative.value
        -0.5
    """
    if len(measurement.totals) != len(baseline.totals):
        raise InvalidInputError(
            f"A paired difference needs the same prompts, but there are "
            f"{len(measurement.totals)} and {len(baseline.totals)}."
        )
    in_both = ((measurement.counts > 0) & (baseline.counts > 0)).astype(float)
    ours, theirs = (
        Measurement(one.totals * in_both, one.counts * in_both) for one in (measurement, baseline)
    )
    samples = _resample_prompts(len(in_both), seed)
    our_values, their_values = _resampled(ours, samples), _resampled(theirs, samples)
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = our_values / their_values - 1
    if np.isfinite(relative).mean() < MIN_FINITE_SHARE:
        relative = np.full_like(relative, np.nan)  # the baseline is close to 0
    return Change(
        _interval(ours.value - theirs.value, our_values - their_values),
        _interval(_ratio(ours.value, theirs.value) - 1, relative),
    )


def at_equal_cost(
    rival: Point, curve: Sequence[Point], baseline: float, seed: int = 0
) -> Interval | None:
    """Compare a rival with the best point of a curve whose cost is not above the rival's.

    The curve is linear between its points. The best point is the farthest from the baseline, in the
    direction in which the curve as a whole departs from it. Nothing is extrapolated.

    Args:
        rival: The point to compare with.
        curve: The points of the curve, in order.
        baseline: The metric's value without steering.
        seed: The seed of the resampling of prompts.

    Returns:
        The curve's best metric minus the rival's, or None if the whole curve has a higher cost
        than the rival, also if this is so in more than 2.5% of the resamples. Up to that share,
        they count as the worst for the curve.

    Example:
        >>> from foretrace.evaluate.metrics import Point, at_equal_cost, mean_score
        >>> low, high, rival = (
        ...     Point(mean_score([[metric]]), mean_score([[cost]]))
        ...     for metric, cost in [(0.0, 10.0), (1.0, 20.0), (0.25, 15.0)]
        ... )
        >>> at_equal_cost(rival, [low, high], baseline=0.0).value
        0.25
    """
    mean = sum(point.metric.value for point in curve) / len(curve)
    sign = 1.0 if mean >= baseline else -1.0
    samples = _resample_prompts(len(rival.metric.totals), seed)
    points = (rival, *curve)
    metrics = np.stack([sign * _with_resampled(point.metric, samples) for point in points])
    costs = np.stack([_with_resampled(point.cost, samples) for point in points])
    best = _best_within(metrics[1:], costs[1:], costs[0])
    gain = sign * (best - metrics[0])
    if not np.isfinite(gain[0]) or np.isfinite(gain[1:]).mean() < MIN_COMPARABLE_SHARE:
        return None
    low = np.quantile(gain[1:], 0.025, method="higher")  # no mean with a resample that is infinite
    high = np.quantile(gain[1:], 0.975, method="lower")
    return Interval(float(gain[0]), float(low), float(high))


def rank_correlation(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Compute Spearman's rank correlation of two sequences; NaN where one of them is constant.

    Example:
        >>> from foretrace.evaluate.metrics import rank_correlation
        >>> round(rank_correlation([1, 2, 3], [10, 20, 40]), 6)
        1.0
    """
    from scipy.stats import spearmanr

    if len(set(ours)) < 2 or len(set(theirs)) < 2:
        return float("nan")
    return float(spearmanr(ours, theirs).statistic)


def _with_resampled(measurement: Measurement, samples: NDArray[np.int64]) -> Floats:
    """Return the value followed by every resampled value: (1 + resamples,)."""
    return np.concatenate([[measurement.value], _resampled(measurement, samples)])


def _best_within(metrics: Floats, costs: Floats, limit: Floats) -> Floats:
    """Return the greatest metric of a piecewise linear curve with a cost within the limit.

    (points, n), (points, n), (n,) -> (n,): -inf where every cost is above the limit.
    """
    best: Floats = np.where(costs <= limit, metrics, -np.inf).max(0)
    if len(metrics) == 1:
        return best
    step = np.diff(costs, axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = (limit - costs[:-1]) / step  # where a piece crosses the limit
    crosses = (share > 0) & (share < 1)
    at_limit = metrics[:-1] + np.where(crosses, share, 0.0) * np.diff(metrics, axis=0)
    best_within: Floats = np.maximum(best, np.where(crosses, at_limit, -np.inf).max(0))
    return best_within


def _without_failures(scores: Scores) -> list[list[float]]:
    return [[score for score in prompt_scores if score is not None] for prompt_scores in scores]


def _count_failures(scores: Scores) -> int:
    return sum(score is None for score in chain.from_iterable(scores))


def _mean_over_prompts(values: Sequence[float | None], dropped: int) -> Measurement:
    """Build the mean over the prompts that have a value."""
    return _measurement(
        [value or 0.0 for value in values], [float(value is not None) for value in values], dropped
    )


def _measurement(totals: Sequence[float], counts: Sequence[float], dropped: int = 0) -> Measurement:
    return Measurement(np.asarray(totals, float), np.asarray(counts, float), dropped)


def _ratio(total: float, count: float) -> float:
    return float(total / count) if count else float("nan")


def _resample_prompts(prompts: int, seed: int) -> NDArray[np.int64]:
    """Draw prompt indices with replacement: (resamples, prompts)."""
    return np.random.default_rng(seed).integers(0, max(1, prompts), (NUM_RESAMPLES, prompts))


def _resampled(measurement: Measurement, samples: NDArray[np.int64]) -> Floats:
    """Compute the metric on resampled prompts, NaN where nothing was measured: (resamples,)."""
    totals, counts = measurement.totals[samples].sum(1), measurement.counts[samples].sum(1)
    nothing = np.full(len(samples), np.nan)
    values: Floats = np.divide(totals, counts, out=nothing, where=counts > 0)
    return values


def _interval(value: float, values: Floats) -> Interval:
    finite = values[np.isfinite(values)]
    if not len(finite):
        return Interval(value, float("nan"), float("nan"))
    low, high = np.quantile(finite, [0.025, 0.975])
    return Interval(value, float(low), float(high))
