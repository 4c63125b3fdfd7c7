"""Compare foretrace's curve with every other method, by each judge, at three equal costs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log
from typing import NamedTuple

import numpy as np

from foretrace.evaluate import metrics
from foretrace.evaluate.metrics import Interval, Measurement, Point, Scores
from foretrace.evaluate.suite import METRICS, JudgePlan
from peers.kept import KeptMethod, KeptTexts

CURVE, STRONG = "foretrace", "foretrace, strong"
PERPLEXITY, EXCESS, PRICE = "perplexity", "excess cross-entropy", "price"
COSTS = (PERPLEXITY, EXCESS, PRICE)
AHEAD, BEHIND, WITHIN = "ahead", "behind", "within"
BELOW, UNKNOWN = "below", "unknown"  # no comparison: the cost is too low, or not known


class Comparison(NamedTuple):
    """Foretrace against a method, by one judge and at one equal cost."""

    verdict: str
    difference: Interval | None = None
    """Foretrace's metric minus the method's; None if they cannot be compared."""
    beyond: bool = False
    """Whether the method costs more than all of foretrace's points."""


@dataclass(frozen=True)
class Measured:
    """The measurements of a suite's methods."""

    baseline: str
    curves: Mapping[str, str | None]
    """The curve of every method."""
    judges: Mapping[str, Mapping[str, Measurement]]
    """By judge and method: the first metric of the judge."""
    costs: Mapping[str, Mapping[str, Measurement]]
    """By cost and method. A method whose cost is not known is absent."""

    @property
    def points(self) -> list[str]:
        """The methods of foretrace's curve. It begins with the baseline, which is strength 0."""
        return [self.baseline, *(name for name, curve in self.curves.items() if curve == CURVE)]

    @property
    def rivals(self) -> list[str]:
        """The methods that foretrace is compared with."""
        return [name for name in self.curves if name not in self.points]

    def compare(self, judge: str, cost: str, rival: str) -> Comparison:
        """Compare foretrace's curve with a method."""
        values, costs = self.judges[judge], self.costs[cost]
        if rival not in costs:
            return Comparison(UNKNOWN)
        baseline = values[self.baseline].value
        points = [Point(values[name], costs[name]) for name in self.points]
        point = Point(values[rival], costs[rival])
        difference = metrics.at_equal_cost(point, points, baseline)
        if difference is None:
            return Comparison(BELOW)
        sign = 1 if sum(one.metric.value - baseline for one in points) >= 0 else -1
        beyond = point.cost.value > max(one.cost.value for one in points)
        return Comparison(_verdict(difference, sign), difference, beyond)

    def compare_curve(self, judge: str, cost: str, curve: str) -> Comparison:
        """Compare `foretrace, strong` with the best of a rival's curve that costs no more."""
        values, costs = self.judges[judge], self.costs[cost]
        names = [self.baseline, *(name for name, one in self.curves.items() if one == curve)]
        if not {STRONG, *names} <= costs.keys():
            return Comparison(UNKNOWN)
        points = [Point(values[name], costs[name]) for name in names]
        ours = Point(values[STRONG], costs[STRONG])
        difference = metrics.at_equal_cost(ours, points, values[self.baseline].value)
        if difference is None:
            return Comparison(BELOW)
        minus = Interval(-difference.value, -difference.high, -difference.low)
        sign = 1 if ours.metric.value >= values[self.baseline].value else -1
        return Comparison(_verdict(minus, sign), minus)


def _verdict(difference: Interval, sign: int) -> str:
    """Return which side a difference is on, where a larger metric times `sign` is better."""
    low, high = sorted(sign * bound for bound in difference[1:])
    return AHEAD if low > 0 else BEHIND if high < 0 else WITHIN


def measure(
    kept: KeptTexts, scores: Mapping[str, Mapping[str, Scores]], plans: Mapping[str, JudgePlan]
) -> Measured:
    """Measure the methods of a suite.

    Args:
        kept: The texts.
        scores: The scores of the texts, by judge and method.
        plans: The judges of the suite, by name.
    """
    costs: dict[str, dict[str, Measurement]] = {cost: {} for cost in COSTS}
    for name, method in kept.methods.items():
        costs[PERPLEXITY][name] = metrics.perplexity(method.losses)
        costs[EXCESS][name] = excess(method, kept.max_new_tokens)
        if (price := price_of(method)) is not None:
            costs[PRICE][name] = price
    judges = {
        judge: {name: METRICS[plans[judge].figures[0]](texts) for name, texts in by_method.items()}
        for judge, by_method in scores.items()
    }
    curves = {name: method.curve for name, method in kept.methods.items()}
    return Measured(kept.header["baseline"], curves, judges, costs)


def excess(method: KeptMethod, max_new_tokens: int) -> Measurement:
    """Compute the cross-entropy under the bare LM minus the entropy, in nats per token.

    It estimates the KL divergence of a method's texts, as they were sampled, from the bare LM. Best
    of n adds an upper bound of its own divergence. Texts that ended early are left out, because the
    losses do not have the end of text.
    """
    totals, counts = np.zeros((2, len(method.texts)))
    rows = zip(method.losses, method.nats, method.tokens, strict=True)
    for prompt, row in enumerate(rows):
        for loss, nats, tokens in zip(*row, strict=True):
            if loss is not None and tokens == max_new_tokens:
                totals[prompt] += loss * tokens - nats + selection_nats(method.best_of)
                counts[prompt] += tokens
    return Measurement(totals, counts)


def price_of(method: KeptMethod) -> Measurement | None:
    """Return the price in nats per token; of best of n, an upper bound; None if it is not known."""
    if method.best_of > 1:
        bounds = [len(row) * selection_nats(method.best_of) for row in method.tokens]
        return Measurement(np.asarray(bounds), np.asarray([float(sum(r)) for r in method.tokens]))
    return metrics.price(method.prices, method.tokens) if method.has_price else None


def selection_nats(best_of: int) -> float:
    """Return the greatest KL divergence of the best of n texts from one text, in nats."""
    return log(best_of) - (best_of - 1) / best_of


class Agreement(NamedTuple):
    """The rank correlation of two judges."""

    texts: float
    methods: float
    num_texts: int


def agreement(scores: Mapping[str, Mapping[str, Scores]], measured: Measured) -> Agreement:
    """Compute how well the first two judges agree: on texts, and on methods."""
    first, second = list(scores)[:2]
    pairs = [
        (ours, theirs)
        for method in measured.curves
        for rows in zip(scores[first][method], scores[second][method], strict=True)
        for ours, theirs in zip(*rows, strict=True)
        if ours is not None and theirs is not None
    ]
    by_method = [
        [measured.judges[judge][method].value for method in measured.curves]
        for judge in (first, second)
    ]
    texts = metrics.rank_correlation(*map(list, zip(*pairs, strict=True)))
    return Agreement(texts, metrics.rank_correlation(*by_method), len(pairs))


def verdicts(measured: Measured, rival: str) -> Sequence[Comparison]:
    """Return the comparisons of foretrace with a method: every judge at every equal cost."""
    return [
        measured.compare(judge, cost, rival) for judge in list(measured.judges) for cost in COSTS
    ]
