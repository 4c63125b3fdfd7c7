"""Levels: strengths by name, each for a price in nats per token.

The price of steering is the KL divergence of the steered from the bare next-token distribution. It
increases with the strength. A level is the strength whose mean price is the level's budget.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
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
START = 2.0  # the first strength to try
TOLERANCE = 0.05  # of the price, relative
MAX_EVALUATIONS = 10  # per level; four in the mean
MAX_FACTOR = 8.0  # between two strengths that are tried one after the other
# Slopes are of the logarithm of the strength by that of the price. For weak steering, the price is
# proportional to the square of the strength.
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


def at_level(attribute: Attribute, level: str, hmm: HMM) -> Attribute:
    """Return the power of an attribute that a level stands for.

    If the attribute was not calibrated, calibrate it with the HMM alone, and log a warning. This
    takes seconds. Attributes without powers and constraints are returned as they are.

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
    if not (attribute.has_power and attribute.has_weights):
        return 1.0
    if level in levels:
        return levels[level]
    strength = hmm_strength(hmm, attribute, BUDGETS[level])
    logger.warning(
        "'%s' was not calibrated: strength %.2g for the level '%s' was found with the HMM alone. "
        "`foretrace calibrate` measures it with the language model.",
        attribute.name,
        strength,
        level,
        extra={"attribute": attribute.name},
    )
    return strength


@lru_cache(256)
def hmm_strength(hmm: HMM, attribute: Attribute, budget: float) -> float:
    """Find the strength of a budget for texts that the HMM itself generates.

    The price of a constraint does not depend on the strength, so that constraints are left out.
    """
    graded = replace(attribute, terms=replace(attribute.terms, automaton=None))
    return find_strength(lambda strength: hmm_price(hmm, graded, strength), budget, {})


PROMPT_TOKENS, TEXT_TOKENS, TEXTS = 8, 16, 16  # of the HMM's texts


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
    ends = torch.tensor(hmm.config.eos_token_ids, dtype=torch.long, device=hmm.device)
    has_ended = torch.isin(prompts, ends).any(1)
    *_, last = inference.scan(hmm, prompts)
    predicted, total, count = last.predicted, 0.0, 0
    for remaining in reversed(range(TEXT_TOKENS)):
        weighted = predicted * lookahead.table_for(remaining)
        probability = hmm.emission.predict(predicted).clamp_min_(inference.IMPOSSIBLE)
        joint = hmm.emission.predict(weighted).clamp_min_(inference.IMPOSSIBLE)
        bare, steered = probability.log(), joint.log_().add_(lookahead.token_weights)
        # Ends are neutral, as they are by default: they keep their probability.
        steered[:, ends] = -torch.inf
        rest = 1 - probability[:, ends].sum(1, keepdim=True)
        steered = steered.log_softmax(-1).add_(rest.clamp_min(inference.IMPOSSIBLE).log_())
        steered[:, ends] = bare[:, ends]
        total += float(prices(bare, steered)[~has_ended].sum())
        count += int((~has_ended).sum())
        tokens = torch.multinomial(steered.softmax(-1), 1, generator=generator)[:, 0]
        has_ended |= torch.isin(tokens, ends)
        predicted = inference.step(hmm, predicted, tokens).predicted
    return total / max(1, count)
