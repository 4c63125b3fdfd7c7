"""Figures of generated texts, as the field computes them, with intervals over prompts.

What could not be judged or measured is dropped and counted, never taken for a number.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import exp
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretrace.errors import InvalidInputError

Scores = Sequence[Sequence[float | None]]
"""One for every continuation of every prompt; None where judging failed."""
Floats = NDArray[np.float64]

THRESHOLD = 0.5  # a continuation above it has the attribute
WORST_PERPLEXITY = 10_000.0  # what is above says nothing but that it is above
RESAMPLINGS = 2_000
MOST_FINITE = 0.99  # of them, or there is no interval


@dataclass(frozen=True, eq=False)
class Measurement:
    """A figure as each prompt's share in it: the sum of totals over the sum of counts."""

    totals: Floats  # (prompts,)
    counts: Floats  # (prompts,): 0 where nothing could be measured
    dropped: int = 0
    """Continuations left out."""

    @property
    def value(self) -> float:
        """The figure itself; NaN if nothing could be measured."""
        return _ratio(self.totals.sum(), self.counts.sum())


class Interval(NamedTuple):
    """A figure with its 95% confidence interval."""

    value: float
    low: float
    high: float


class Change(NamedTuple):
    """What a method makes of a baseline's figure, on the same prompts."""

    difference: Interval
    relative: Interval


class Point(NamedTuple):
    """A method on a curve of trade-off: what it reaches, and at what price."""

    figure: Measurement
    price: Measurement


def average_maximum(scores: Scores) -> Measurement:
    """Average over prompts the greatest score among a prompt's continuations."""
    return _over_prompts([max(own, default=None) for own in _judged(scores)], _failed(scores))


def probability_of_any(scores: Scores, threshold: float = THRESHOLD) -> Measurement:
    """Give the share of prompts with at least one continuation above the threshold."""
    found = [float(max(own) > threshold) if own else None for own in _judged(scores)]
    return _over_prompts(found, _failed(scores))


def mean_score(scores: Scores) -> Measurement:
    """Average over all continuations: role quality, political relevance, sentiment."""
    judged = _judged(scores)
    return _measurement([sum(own) for own in judged], [len(own) for own in judged], _failed(scores))


def distinct(texts: Sequence[Sequence[str]], n: int) -> Measurement:
    """Give dist-n: a prompt's distinct n-grams over all its continuations, per word of them."""
    shares: list[float | None] = []
    for own in texts:
        words = [text.split(" ") for text in own if text.strip()]
        grams = {tuple(each[i : i + n]) for each in words for i in range(len(each) - n + 1)}
        shares.append(len(grams) / sum(map(len, words)) if words else None)
    blank = sum(not text.strip() for own in texts for text in own)
    return _over_prompts(shares, blank)


def perplexity(surprise: Scores) -> Measurement:
    """Average the perplexities of continuations; `surprise` is each one's nats per token.

    A continuation without tokens has none, and one of 10,000 or more is dropped.
    """
    kept = [
        [value for nats in own if (value := exp(min(nats, 100.0))) < WORST_PERPLEXITY]
        for own in _judged(surprise)
    ]
    dropped = sum(map(len, surprise)) - sum(map(len, kept))
    return _measurement([sum(own) for own in kept], [len(own) for own in kept], dropped)


def words(texts: Sequence[Sequence[str]]) -> Measurement:
    """Give the mean number of words of a continuation; a method may escape into short ones."""
    counts = [[float(len(text.split())) for text in own] for own in texts]
    return mean_score(counts)


def blank(texts: Sequence[Sequence[str]]) -> Measurement:
    """Give the share of continuations without any word."""
    return mean_score([[float(not text.strip()) for text in own] for own in texts])


def interval(measurement: Measurement, seed: int = 0) -> Interval:
    """Give a figure with its interval, by resampling prompts."""
    values = _resampled(measurement, _draws(len(measurement.totals), seed))
    return _interval(measurement.value, values)


def change(measurement: Measurement, baseline: Measurement, seed: int = 0) -> Change:
    """Compare with a baseline on the prompts that both measured: they are resampled together."""
    if len(measurement.totals) != len(baseline.totals):
        raise InvalidInputError(
            f"A paired difference needs the same prompts, but there are "
            f"{len(measurement.totals)} and {len(baseline.totals)}."
        )
    both = ((measurement.counts > 0) & (baseline.counts > 0)).astype(float)
    ours, theirs = (
        Measurement(each.totals * both, each.counts * both) for each in (measurement, baseline)
    )
    draws = _draws(len(both), seed)
    our_draws, their_draws = _resampled(ours, draws), _resampled(theirs, draws)
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = our_draws / their_draws - 1
    if np.isfinite(relative).mean() < MOST_FINITE:
        relative = np.full_like(relative, np.nan)  # a share of almost nothing
    return Change(
        _interval(ours.value - theirs.value, our_draws - their_draws),
        _interval(_ratio(ours.value, theirs.value) - 1, relative),
    )


def at_equal_price(
    rival: Point, curve: Sequence[Point], baseline: float, seed: int = 0
) -> Interval | None:
    """Compare a rival with the best point of a curve that costs no more, on the same prompts.

    Between its points a curve is taken as straight. Best is farthest from the baseline, on the
    side on which the curve lies. None if the whole curve costs more.
    """
    mean = sum(each.figure.value for each in curve) / len(curve)
    side = 1.0 if mean >= baseline else -1.0
    draws = _draws(len(rival.figure.totals), seed)
    figures = np.stack([side * _with_resampled(each.figure, draws) for each in (rival, *curve)])
    prices = np.stack([_with_resampled(each.price, draws) for each in (rival, *curve)])
    best = _best_within(figures[1:], prices[1:], prices[0])
    found = side * (best - figures[0])
    return _interval(float(found[0]), found[1:]) if np.isfinite(found[0]) else None


def _with_resampled(measurement: Measurement, draws: NDArray[np.int64]) -> Floats:
    """Give the figure itself, and after it every resampled one: (1 + draws,)."""
    return np.concatenate([[measurement.value], _resampled(measurement, draws)])


def _best_within(figures: Floats, prices: Floats, limit: Floats) -> Floats:
    """Give the greatest figure of a curve of straight pieces at a price within the limit.

    (points, n), (points, n), (n,) -> (n,): -inf where every price is above.
    """
    best: Floats = np.where(prices <= limit, figures, -np.inf).max(0)
    if len(figures) == 1:
        return best
    step = np.diff(prices, axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = (limit - prices[:-1]) / step  # where a piece crosses the limit
    crossed = (share > 0) & (share < 1)
    between = figures[:-1] + np.where(crossed, share, 0.0) * np.diff(figures, axis=0)
    found: Floats = np.maximum(best, np.where(crossed, between, -np.inf).max(0))
    return found


def _judged(scores: Scores) -> list[list[float]]:
    return [[score for score in own if score is not None] for own in scores]


def _failed(scores: Scores) -> int:
    return sum(score is None for score in chain.from_iterable(scores))


def _over_prompts(values: Sequence[float | None], dropped: int) -> Measurement:
    """Let every prompt that has a value count once."""
    return _measurement(
        [value or 0.0 for value in values], [float(value is not None) for value in values], dropped
    )


def _measurement(totals: Sequence[float], counts: Sequence[float], dropped: int) -> Measurement:
    return Measurement(np.asarray(totals, float), np.asarray(counts, float), dropped)


def _ratio(total: float, count: float) -> float:
    return float(total / count) if count else float("nan")


def _draws(prompts: int, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, max(1, prompts), (RESAMPLINGS, prompts))


def _resampled(measurement: Measurement, draws: NDArray[np.int64]) -> Floats:
    totals, counts = measurement.totals[draws].sum(1), measurement.counts[draws].sum(1)
    found: Floats = np.divide(totals, counts, out=np.full(len(draws), np.nan), where=counts > 0)
    return found


def _interval(value: float, values: Floats) -> Interval:
    finite = values[np.isfinite(values)]
    if not len(finite):
        return Interval(value, float("nan"), float("nan"))
    low, high = np.quantile(finite, [0.025, 0.975])
    return Interval(value, float(low), float(high))


def rank_correlation(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Give Spearman's; not a number where one of them never changes."""
    from scipy.stats import spearmanr

    if len(set(ours)) < 2 or len(set(theirs)) < 2:
        return float("nan")
    return float(spearmanr(ours, theirs).statistic)
