"""Levels: strengths for prices in nats per token."""

from math import exp, log, sin

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.lookahead import levels
from foretrace.lookahead.levels import (
    BUDGETS,
    MAX_EVALUATIONS,
    MAX_STRENGTH,
    MIN_STRENGTH,
    TOLERANCE,
    find_strength,
)


@given(
    solution=st.floats(0.02, 80.0),
    power=st.floats(0.7, 3.0),
    budget=st.sampled_from(list(BUDGETS.values())),
    noise=st.floats(0.0, 0.02),
    cap=st.floats(2.0, 50.0),
    start=st.floats(0.5, 20.0),
)
def test_strength_is_found_in_few_evaluations(
    solution: float, power: float, budget: float, noise: float, cap: float, start: float
) -> None:
    """The price is a power that saturates, with noise that depends on the strength."""
    ratio = cap / (cap - 1)

    def price(strength: float) -> float:
        assert MIN_STRENGTH <= strength <= MAX_STRENGTH
        relative = (strength / solution) ** power
        saturated = ratio * relative / (1 + (ratio - 1) * relative)
        return float(budget * saturated * (1 + noise * sin(1e3 * strength)))

    known: dict[float, float] = {}
    strength = find_strength(price, budget, known, start=start)
    assert len(known) <= MAX_EVALUATIONS
    assert abs(known[strength] / budget - 1) <= TOLERANCE


@given(st.floats(0.0, 0.018), st.floats(0.5, 20.0))
def test_price_below_the_budget_at_all_strengths(limit: float, start: float) -> None:
    """The price flattens out: the strength costs nearly as much as the largest one."""
    known: dict[float, float] = {}
    strength = find_strength(lambda k: limit * (1 - exp(-k)), 0.02, known, start=start)
    assert len(known) <= MAX_EVALUATIONS
    assert strength == max(known)
    assert known[strength] >= 0.99 * limit
    if limit < 0.01:
        assert strength == MAX_STRENGTH


def test_price_above_the_budget_at_all_strengths() -> None:
    known: dict[float, float] = {}
    assert find_strength(lambda _: 1.0, 0.02, known) == MIN_STRENGTH
    assert len(known) <= MAX_EVALUATIONS


def test_noise_does_not_prolong_the_search() -> None:
    """The price jumps at the budget: no strength is within the tolerance."""
    known: dict[float, float] = {}
    strength = find_strength(lambda k: 0.03 if k < 5 else 0.09, 0.06, known)
    assert abs(log(strength / 5)) < log(2)
    assert len(known) <= MAX_EVALUATIONS


def test_known_prices_are_shared_between_levels() -> None:
    known: dict[float, float] = {}
    for count, budget in ((3, 0.06), (4, 0.02), (5, 0.15)):
        strength = find_strength(lambda k: 0.01 * k**1.5, budget, known)
        assert strength == pytest.approx((budget / 0.01) ** (1 / 1.5), rel=TOLERANCE)
        assert len(known) <= count


@pytest.mark.parametrize(
    ("prices", "expected"), [((0.0599, 0.07), 0), ((0.05, 0.0601), 1), ((0.06, 0.07), 0)]
)
def test_between_two_strengths_that_are_close_the_better_one_is_final(
    prices: tuple[float, float], expected: int
) -> None:
    strengths = 1.0, exp(0.9 * levels.MIN_BRACKET)
    known = dict(zip(strengths, prices, strict=True))
    assert levels._next_strength(known, 0.06, 1.0) == strengths[expected]
