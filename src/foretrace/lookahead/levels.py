"""Levels: strengths by name, each for a price in nats per token.

The price of steering is the KL divergence of the steered from the bare next-token distribution. It
increases with the strength. A level is the strength whose mean price is the level's budget.
"""

import logging
from collections.abc import Callable, Mapping
from functools import lru_cache
from math import exp, log

import torch

from foretrace.attribute import Attribute
from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM, inference
from foretrace.lookahead.lookahead import Lookahead
from foretrace.lookahead.price import prices

logger = logging.getLogger(__name__)

BUDGETS: Mapping[str, float] = {"mild": 0.02, "medium": 0.06, "strong": 0.15}  # nats per token
DEFAULT_LEVEL = "medium"
MIN_STRENGTH, MAX_STRENGTH = 0.01, 100.0
TOLERANCE = 0.05  # of the price, relative
MAX_EVALUATIONS = 6  # per level


def find_strength(
    price: Callable[[float], float], budget: float, known: dict[float, float]
) -> float:
    """Find the strength whose price is `budget`, by the secant method on logarithms.

    The price is nearly a power of the strength. It is not evaluated beyond MIN_STRENGTH and
    MAX_STRENGTH: where nothing can be bought, the largest strength is returned.

    Args:
        price: Returns the mean price of a strength in nats per token.
        budget: The price to reach.
        known: Prices of strengths that were evaluated before. New ones are added.

    Returns:
        The strength.
    """
    strength = _guess(known, budget)
    for _ in range(MAX_EVALUATIONS):
        if strength not in known:
            known[strength] = price(strength)
        spent = known[strength]
        within = abs(spent / budget - 1) <= TOLERANCE
        if (
            within
            or (strength == MAX_STRENGTH and spent < budget)
            or (strength == MIN_STRENGTH and spent > budget)
        ):
            return strength
        strength = _guess(known, budget)
    return min(known, key=lambda tried: abs(log(max(known[tried], 1e-9) / budget)))


def _guess(known: Mapping[float, float], budget: float) -> float:
    """Interpolate or extrapolate the strength of a budget from the two nearest known prices."""
    points = sorted((log(max(spent, 1e-9)), log(strength)) for strength, spent in known.items())
    target = log(budget)
    if not points:
        return 2.0
    if len(points) == 1:  # for weak steering, the price is proportional to the square
        guess = points[0][1] + (target - points[0][0]) / 2
    else:
        points.sort(key=lambda point: abs(point[0] - target))
        below = [point for point in points if point[0] <= target]
        above = [point for point in points if point[0] > target]
        first, second = (below[0], above[0]) if below and above else points[:2]
        slope = (second[1] - first[1]) / ((second[0] - first[0]) or 1e-9)
        guess = first[1] + min(max(slope, 0.1), 3.0) * (target - first[0])
        if below and above:
            bounds = sorted((first[1], second[1]))
            guess = min(max(guess, bounds[0]), bounds[1])
    nearest = max(min(guess, points[0][1] + log(8)), points[0][1] - log(8))
    return min(max(exp(nearest), MIN_STRENGTH), MAX_STRENGTH)


def at_level(attribute: Attribute, level: str, hmm: HMM) -> Attribute:
    """Return the power of an attribute that a level stands for.

    An attribute that was not calibrated is calibrated with the HMM alone, which takes seconds and
    is logged. Attributes without powers and constraints are returned as they are.

    Args:
        attribute: The attribute.
        level: The name of a level.
        hmm: The HMM to calibrate with.

    Returns:
        The power.

    Raises:
        InvalidInputError: If there is no such level.
    """
    return attribute ** strength_of(attribute, level, hmm)


def strength_of(attribute: Attribute, level: str, hmm: HMM) -> float:
    """Return the strength of a level; 1 for attributes without powers and for constraints."""
    levels = attribute.config.levels
    if level not in BUDGETS and level not in levels:
        raise InvalidInputError(
            f"There is no level '{level}'. Choose one of {', '.join({**BUDGETS, **levels})}."
        )
    has_weights = bool(len(attribute.terms.tokens)) or bool(attribute.evidence)
    if not (attribute.has_power and has_weights):
        return 1.0
    if level in levels:
        return levels[level]
    strength = _hmm_strength(hmm, attribute, BUDGETS[level])
    logger.warning(
        "'%s' was not calibrated: strength %.2g for the level '%s' was found with the HMM alone. "
        "`foretrace calibrate` measures it with the language model.",
        attribute.name,
        strength,
        level,
    )
    return strength


@lru_cache(256)
def _hmm_strength(hmm: HMM, attribute: Attribute, budget: float) -> float:
    """Find the strength of a budget for texts that the HMM itself generates."""
    return find_strength(lambda strength: hmm_price(hmm, attribute, strength), budget, {})


PROMPT_TOKENS, TEXT_TOKENS, TEXTS = 8, 24, 32  # of the HMM's texts


@torch.inference_mode()
def hmm_price(hmm: HMM, attribute: Attribute, strength: float) -> float:
    """Return the mean price per token of steering texts that the HMM generates.

    Args:
        hmm: The HMM, which takes the place of the language model.
        attribute: An attribute without a constraint.
        strength: The strength of steering toward it.

    Returns:
        Nats per token.
    """
    lookahead = Lookahead(hmm, attribute**strength, TEXT_TOKENS)
    generator = torch.Generator(hmm.device).manual_seed(0)
    prompts = hmm.sample(TEXTS, PROMPT_TOKENS, seed=0)
    *_, last = inference.scan(hmm, prompts)
    predicted, spent = last.predicted, []
    for remaining in reversed(range(TEXT_TOKENS)):
        weighted = predicted * lookahead.table_for(remaining)
        probability = hmm.emission.predict(predicted).clamp_min_(inference.IMPOSSIBLE)
        joint = hmm.emission.predict(weighted).clamp_min_(inference.IMPOSSIBLE)
        steered = joint.log_().add_(lookahead.token_weights)
        spent.append(prices(probability.log_(), steered))
        tokens = torch.multinomial(steered.softmax(-1), 1, generator=generator)[:, 0]
        predicted = inference.step(hmm, predicted, tokens).predicted
    return float(torch.stack(spent).mean())
