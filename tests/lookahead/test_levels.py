"""Levels: strengths for prices in nats per token."""

import logging
from math import exp, log, sin

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretrace.attribute import Attribute
from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM
from foretrace.lookahead import Lookahead, levels
from foretrace.lookahead.levels import (
    BUDGETS,
    MAX_EVALUATIONS,
    MAX_STRENGTH,
    MIN_STRENGTH,
    TOLERANCE,
    at_level,
    find_strength,
    hmm_price,
    strength_of,
)
from foretrace.steering import Goal

VOCAB = 12
SPELLED = [bytes([97 + index]) for index in range(VOCAB)]


@pytest.fixture(scope="module")
def hmm() -> HMM:
    return HMM.random(6, VOCAB, eos_token_id=0, seed=0)


def attribute(**levels_of: float) -> Attribute:
    product = Attribute.from_weights(torch.linspace(0.5, 1.0, VOCAB), name="polite")
    object.__setattr__(product.config, "levels", levels_of)
    return product


def rewards() -> Attribute:
    return Attribute.from_rewards(torch.linspace(-1.0, 1.0, VOCAB), name="kind")


@pytest.mark.parametrize("make", [attribute, rewards])
def test_price_increases_with_strength(make: object, hmm: HMM) -> None:
    assert callable(make)
    prices = [hmm_price(hmm, make(), strength) for strength in (0.1, 0.5, 1.0, 2.0, 4.0)]
    assert prices == sorted(prices)
    assert 0 < prices[0] < 0.1 * prices[-1]


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


@pytest.mark.parametrize("make", [attribute, rewards])
def test_an_attribute_without_levels_is_calibrated_with_the_hmm(
    make: object, hmm: HMM, caplog: pytest.LogCaptureFixture
) -> None:
    assert callable(make)
    uncalibrated = make()
    with caplog.at_level(logging.WARNING, "foretrace"):
        strengths = [strength_of(uncalibrated, level, hmm) for level in BUDGETS]
    assert strengths == sorted(strengths)
    for strength, budget in zip(strengths, BUDGETS.values(), strict=True):
        assert hmm_price(hmm, uncalibrated, strength) == pytest.approx(budget, rel=TOLERANCE)
    assert caplog.messages == [
        f"'{uncalibrated.name}' was not calibrated: strength {strength:.2g} for the level "
        f"'{level}' was found with the HMM alone. `foretrace calibrate` measures it with the "
        f"language model."
        for strength, level in zip(strengths, BUDGETS, strict=True)
    ]


def test_levels_of_the_config_are_used(
    hmm: HMM, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(levels, "hmm_price", None)  # calling it would fail
    calibrated = attribute(mild=1.5, medium=3.0)
    assert strength_of(calibrated, "mild", hmm) == 1.5
    assert at_level(calibrated, "medium", hmm).name == "polite ** 3"
    assert Goal(Lookahead(hmm, calibrated, 4)).strength == 3.0
    assert not caplog.messages


def test_constraints_and_sums_of_products_have_strength_1(hmm: HMM) -> None:
    constraint = Attribute.contains("ab", SPELLED)
    for fixed in (constraint, ~constraint, ~attribute(), attribute() | constraint):
        assert strength_of(fixed, "strong", hmm) == 1.0


def test_constraints_do_not_change_the_strength_of_a_level(
    hmm: HMM, caplog: pytest.LogCaptureFixture
) -> None:
    constraint = Attribute.contains("ab", SPELLED)
    calibrated = attribute(medium=3.0)
    for both in (calibrated & ~constraint, constraint & calibrated):
        assert strength_of(both, "medium", hmm) == 3.0
        assert both.config.levels == {"medium": 3.0}
    assert not caplog.messages
    assert (calibrated & attribute(medium=2.0)).config.levels == {}
    uncalibrated = rewards()
    alone = strength_of(uncalibrated, "medium", hmm)
    assert strength_of(uncalibrated & constraint, "medium", hmm) == alone


def test_unknown_levels_are_refused(hmm: HMM) -> None:
    with pytest.raises(InvalidInputError, match=r"no level 'huge'.*mild, medium, strong"):
        strength_of(attribute(), "huge", hmm)


@pytest.mark.parametrize(
    ("prices", "expected"), [((0.0599, 0.07), 0), ((0.05, 0.0601), 1), ((0.06, 0.07), 0)]
)
def test_between_two_strengths_that_are_close_the_better_one_is_final(
    prices: tuple[float, float], expected: int
) -> None:
    strengths = 1.0, exp(0.9 * levels.MIN_BRACKET)
    known = dict(zip(strengths, prices, strict=True))
    assert levels._next_strength(known, 0.06, 1.0) == strengths[expected]
