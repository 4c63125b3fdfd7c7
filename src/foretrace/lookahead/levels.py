"""Levels: strengths by name, each for a price in nats per token.

The price of steering is the KL divergence of the steered from the bare next-token distribution. It
increases with the strength. A level is the strength whose mean price is the level's budget.
"""

from collections.abc import Callable, Mapping
from math import exp, log

BUDGETS: Mapping[str, float] = {"mild": 0.02, "medium": 0.06, "strong": 0.15}  # nats per token
DEFAULT_LEVEL = "medium"
MAX_REWARD_PRICE = 1.0  # nats per step: several times the price of the strongest level
MIN_STRENGTH, MAX_STRENGTH = 0.01, 100.0
START = 2.0  # the first strength to try
TOLERANCE = 0.05  # of the price, relative
MAX_EVALUATIONS = 10  # per level; four in the mean
MAX_FACTOR = 8.0  # between two strengths that are tried one after the other
# A slope is the change of log(strength) over the change of log(price). For weak steering, the price
# is proportional to the square of the strength, so that the slope is 1/2.
PRIOR_SLOPE, PRIOR_WEIGHT, FLAT_SLOPE = 0.5, 0.1, 2.0
MIN_DISTANCE = 0.4  # of two strengths, as a logarithm, for a slope
MIN_BRACKET = 0.01  # relative: within it, prices differ by noise


def find_strength(
    price: Callable[[float], float],
    budget: float,
    known: dict[float, float],
    *,
    start: float = START,
    tolerance: float = TOLERANCE,
) -> float:
    """Find the strength whose price is `budget`, by the secant method on logarithms.

    The price is nearly a power of the strength. It is not evaluated beyond MIN_STRENGTH and
    MAX_STRENGTH. Where no strength reaches the budget, a bound or the nearest price is returned.

    Args:
        price: Returns the mean price of a strength in nats per token.
        budget: The price to reach.
        known: Prices of strengths that were evaluated before. New ones are added.
        start: The strength to begin with, if nothing is known.
        tolerance: The largest relative error of the price.

    Returns:
        The strength, a key of `known`.
    """
    for _ in range(MAX_EVALUATIONS):
        if known and abs(known[best := _nearest(known, budget)] / budget - 1) <= tolerance:
            return best
        strength = _next_strength(known, budget, start)
        if strength in known:  # a bound, or a bracket too narrow to go on
            return strength
        known[strength] = price(strength)
    return _nearest(known, budget)


def _nearest(known: Mapping[float, float], budget: float) -> float:
    """Return the strength whose price is nearest to the budget; of several, the last one tried."""
    return min(reversed(list(known)), key=lambda tried: abs(_log_excess(known, tried, budget)))


def _log_excess(known: Mapping[float, float], strength: float, budget: float) -> float:
    """Return the logarithm of a known price over the budget; a price of 0 counts as 1e-12."""
    return log(max(known[strength], 1e-12) / budget)


def _next_strength(known: Mapping[float, float], budget: float, start: float) -> float:
    """Return the strength to try next; a known one if there is nothing left to try."""
    if not known:
        return start
    excess = {tried: _log_excess(known, tried, budget) for tried in known}
    # The price increases with the strength, up to noise: the budget is between these two.
    above = min((tried for tried in known if excess[tried] > 0), default=None)
    below = max(
        (tried for tried in known if excess[tried] <= 0 and (above is None or tried < above)),
        default=None,
    )
    if below is not None and above is not None:
        width = log(above / below)
        if width <= MIN_BRACKET:
            return min((below, above), key=lambda tried: abs(excess[tried]))
        share = -excess[below] / (excess[above] - excess[below])
        return below * exp(width * min(max(share, 0.05), 0.95))
    direction = 1 if above is None else -1
    nearest, *others = sorted(known, reverse=above is None)
    distance, slope = 0.0, PRIOR_SLOPE
    if others:  # of the others, one that is far enough for a slope that is not noise
        other = next((x for x in others if abs(log(x / nearest)) > MIN_DISTANCE), others[-1])
        distance, difference = abs(log(other / nearest)), abs(excess[other] - excess[nearest])
        slope = (distance + PRIOR_SLOPE * PRIOR_WEIGHT) / (difference + PRIOR_WEIGHT)
    size = slope * abs(excess[nearest])
    if slope > FLAT_SLOPE:  # the price flattens out, and more so farther away
        size = max(size, distance)
    strength = nearest * exp(direction * min(size, log(MAX_FACTOR)))
    return min(max(strength, MIN_STRENGTH), MAX_STRENGTH)
