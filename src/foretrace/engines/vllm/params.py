"""What a request asks for: goals as text and numbers, read with care. Anybody may send them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from foretrace.attribute import Expression, parse
from foretrace.attribute.expression import Mention, Sign
from foretrace.errors import InvalidInputError

KEYS = (
    "goal",
    "must_contain",
    "must_not_contain",
    "strength",
    "shift",
    "horizon",
    "neutral_end",
)
MOST_GOALS, MOST_CHARACTERS, MOST_NAMES = 4, 1_000, 16
MOST_TEXTS, MOST_BYTES = 16, 200  # that must occur or not: each is read by an automaton
CONSTRAINTS = ("must_contain", "must_not_contain")
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
    constraints = [key for key in CONSTRAINTS if key in own]
    if "goal" not in own:
        # Whoever meant to give a goal must not get a text without one.
        if close := [key for key in given or {} if str(key).lower() in ("goal", "goals")]:
            raise InvalidInputError(f"Did you mean goal, where you say {close[0]}?")
        if own and not constraints:
            raise InvalidInputError(f"{next(iter(own))} is given without a goal.")
        if not own:
            return None
    texts = _list(own.get("goal", []))
    if not 1 <= len(texts) + bool(constraints) <= MOST_GOALS:
        beside = " beside what must occur or must not" if constraints else ""
        raise InvalidInputError(
            f"A request has 1 to {MOST_GOALS} goals in all, not {len(texts)}{beside}."
        )
    # Strength and shift are the goals'; if there are none, of what must occur or must not.
    count = len(texts) or 1
    strengths = _numbers(own, "strength", 1.0, count, MOST_STRENGTH)
    shifts = _numbers(own, "shift", 0.0, count, MOST_SHIFT)
    if least := [each for each in strengths if each <= 0]:
        raise InvalidInputError(f"strength must be above 0, not {least[0]:g}.")
    expressions = [_expression(text) for text in texts]
    if constraints:
        expressions.append(constraint(*(_texts(own, key) for key in CONSTRAINTS)))
        strengths, shifts = [*strengths, 1.0], [*shifts, 0.0]
    pairs = list(zip(strengths, shifts, strict=True))[: len(expressions)]
    goals = tuple(AskedGoal(each, *pair) for each, pair in zip(expressions, pairs, strict=True))
    _require_few_mentions(goals)
    return Asked(goals, _horizon(own.get("horizon")), _flag(own.get("neutral_end", False)))


def constraint(must: Sequence[str], must_not: Sequence[str]) -> Expression:
    """Write as an expression that all of the former occur, and none of the latter."""
    steps: list[str | Sign | Mention] = [Mention((text,)) for text in must]
    if must_not:
        steps += [Mention(tuple(must_not)), Sign.NOT]
    parts = len(must) + bool(must_not)
    return Expression((*steps, *[Sign.AND] * (parts - 1)))


def _texts(own: Mapping[str, Any], key: str) -> list[str]:
    found = _list(own.get(key, []))
    if key in own and not (found and all(isinstance(each, str) and each for each in found)):
        raise InvalidInputError(f"{key} must be a text, or a list of them.")
    return found


def _require_few_mentions(goals: Sequence[AskedGoal]) -> None:
    mentioning = [goal.expression for goal in goals if goal.expression.mentions]
    if len(mentioning) > 1:
        raise InvalidInputError(
            "Two goals say what must occur or must not. Join them by & to one, as in "
            'nontoxic & mentions("refund").'
        )
    texts = [text for each in mentioning for mention in each.mentions for text in mention.texts]
    size = len("".join(texts).encode("utf-8", "replace"))
    if any("\ud800" <= letter <= "\udfff" for text in texts for letter in text):
        raise InvalidInputError("What must occur or must not has characters that no text has.")
    if len(texts) > MOST_TEXTS or size > MOST_BYTES:
        raise InvalidInputError(
            f"A request has {MOST_TEXTS} texts that must occur or not, of {MOST_BYTES} bytes "
            f"together, at most."
        )


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


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
