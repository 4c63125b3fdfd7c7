"""What a request asks for: goals as text and numbers, read with care. Anybody may send them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from foretrace.attribute import Expression, parse
from foretrace.attribute.expression import Sign
from foretrace.errors import InvalidInputError

KEYS = ("goal", "strength", "shift", "horizon", "neutral_end")
MOST_GOALS, MOST_CHARACTERS, MOST_NAMES = 4, 1_000, 16
MOST_STRENGTH, MOST_SHIFT = 1_000.0, 10_000.0


@dataclass(frozen=True)
class AskedGoal:
    """One goal: an expression over names of attributes, and how strongly."""

    expression: Expression
    strength: float = 1.0
    shift: float = 0.0


@dataclass(frozen=True)
class Asked:
    """All that a request asks for; several goals multiply."""

    goals: tuple[AskedGoal, ...]
    horizon: int | None = None
    neutral_end: bool = False


def read_asked(given: Mapping[str, Any] | None) -> Asked | None:
    """Read a request's own arguments; None if it asks for nothing. Those of others are passed by.

    `goal` is an expression, or a list of them; `strength` and `shift` are for all or for each.
    """
    own = {key: given[key] for key in KEYS if key in given} if given else {}
    if "goal" not in own:
        # Whoever meant to give a goal must not get a text without one.
        if close := [key for key in given or {} if str(key).lower() in ("goal", "goals")]:
            raise InvalidInputError(f"Did you mean goal, where you say {close[0]}?")
        if own:
            raise InvalidInputError(f"{next(iter(own))} is given without a goal.")
        return None
    texts = own["goal"] if isinstance(own["goal"], list) else [own["goal"]]
    if not 1 <= len(texts) <= MOST_GOALS:
        raise InvalidInputError(f"A request has 1 to {MOST_GOALS} goals, not {len(texts)}.")
    strengths = _numbers(own, "strength", 1.0, len(texts), MOST_STRENGTH)
    shifts = _numbers(own, "shift", 0.0, len(texts), MOST_SHIFT)
    if least := [each for each in strengths if each <= 0]:
        raise InvalidInputError(f"strength must be above 0, not {least[0]:g}.")
    goals = tuple(map(AskedGoal, map(_expression, texts), strengths, shifts))
    return Asked(goals, _horizon(own.get("horizon")), _flag(own.get("neutral_end", False)))


def _expression(text: Any) -> Expression:
    if not isinstance(text, str) or not text.strip():
        raise InvalidInputError("goal must be an expression such as 'nontoxic & ~formal'.")
    if len(text) > MOST_CHARACTERS:
        raise InvalidInputError(f"A goal has {MOST_CHARACTERS:,} characters at most.")
    expression = parse(text)
    if sum(not isinstance(step, Sign) for step in expression.steps) > MOST_NAMES:
        raise InvalidInputError(f"A goal names attributes {MOST_NAMES} times at most.")
    return expression


def _numbers(
    own: Mapping[str, Any], key: str, default: float, count: int, most: float
) -> list[float]:
    """Read a number for each goal; one is for all."""
    value = own.get(key, default)
    values: Sequence[Any] = value if isinstance(value, list) else [value] * count
    if len(values) != count:
        raise InvalidInputError(f"{key} has {len(values)} values, for {count} goals.")
    return [_number(key, each, most) for each in values]


def _number(key: str, value: Any, most: float) -> float:
    try:
        number = float("nan") if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    if not isfinite(number) or abs(number) > most:
        raise InvalidInputError(f"{key} must be a number within {most:g}, not {str(value)[:40]!r}.")
    return number


def _horizon(value: Any) -> int | None:
    if value is None:
        return None
    number = _number("horizon", value, 1e6)
    if number < 0 or number != int(number):
        raise InvalidInputError(f"horizon must be a whole number of tokens, not {number:g}.")
    return int(number)


def _flag(value: Any) -> bool:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if value in (0, 1) and not isinstance(value, str):
        return bool(value)
    raise InvalidInputError(f"neutral_end must be true or false, not {str(value)[:40]!r}.")
