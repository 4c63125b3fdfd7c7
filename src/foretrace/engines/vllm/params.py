"""Parse and check the steering parameters of a request, which come from untrusted clients."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from foretrace.attribute import Expression
from foretrace.attribute import parse as parse_expression
from foretrace.attribute.expression import Mention, Operator
from foretrace.errors import InvalidInputError
from foretrace.steering.request import require_single_constraint

KEYS = (
    "goal",
    "must_contain",
    "must_not_contain",
    "strength",
    "shift",
    "horizon",
    "neutral_end",
)
CONSTRAINTS = ("must_contain", "must_not_contain")
MAX_GOALS, MAX_CHARACTERS, MAX_NAMES = 4, 1_000, 16
MAX_TEXTS, MAX_BYTES = 16, 200  # of required and forbidden texts: each becomes an automaton
MAX_STRENGTH, MAX_SHIFT = 1_000.0, 10_000.0


@dataclass(frozen=True)
class GoalParams:
    """One goal of a request: an expression over attribute names, and its transform."""

    expression: Expression
    strength: float = 1.0
    shift: float = 0.0


@dataclass(frozen=True)
class SteeringParams:
    """The goals of a request, whose factors multiply, and options for all of them."""

    goals: tuple[GoalParams, ...]
    horizon: int | None = None
    neutral_end: bool = False


def parse(extra_args: Mapping[str, Any] | None) -> SteeringParams | None:
    """Parse the extra arguments of a request; arguments of other plugins are ignored.

    Args:
        extra_args: `goal` is an expression or a list of expressions. `strength` and `shift` are
            numbers for all goals, or a list with one for each.

    Returns:
        The parameters, or None if the request is not steered.

    Raises:
        InvalidInputError: An argument is not valid.
    """
    args = {key: extra_args[key] for key in KEYS if key in extra_args} if extra_args else {}
    constraints = [key for key in CONSTRAINTS if key in args]
    if "goal" not in args:
        # A misspelt goal must not produce an unsteered text.
        if close := [key for key in extra_args or {} if str(key).lower() in ("goal", "goals")]:
            raise InvalidInputError(f"Did you mean goal, where you say {close[0]}?")
        if args and not constraints:
            raise InvalidInputError(f"{next(iter(args))} is given without a goal.")
        if not args:
            return None
    texts = _as_list(args.get("goal", []))
    if not 1 <= len(texts) + bool(constraints) <= MAX_GOALS:
        counted = " and a required or forbidden text" if constraints else ""
        raise InvalidInputError(
            f"A request has 1 to {MAX_GOALS} goals in all, not {len(texts)}{counted}."
        )
    # Strength and shift apply to the goals; without goals, to required and forbidden texts.
    count = len(texts) or 1
    strengths = _numbers(args, "strength", 1.0, count, MAX_STRENGTH)
    shifts = _numbers(args, "shift", 0.0, count, MAX_SHIFT)
    if wrong := [strength for strength in strengths if strength <= 0]:
        raise InvalidInputError(f"strength must be above 0, not {wrong[0]:g}.")
    expressions = [_expression(text) for text in texts]
    if constraints:
        expressions.append(constraint(*(_texts(args, key) for key in CONSTRAINTS)))
        strengths, shifts = [*strengths, 1.0], [*shifts, 0.0]
    goals = tuple(map(GoalParams, expressions, strengths, shifts))
    _check_mentions(goals)
    return SteeringParams(goals, _horizon(args.get("horizon")), _flag(args.get("neutral_end", 0)))


def constraint(must: Sequence[str], must_not: Sequence[str]) -> Expression:
    """Return the expression that all of `must` occur and none of `must_not`."""
    steps: list[str | Operator | Mention] = [Mention((text,)) for text in must]
    if must_not:
        steps += [Mention(tuple(must_not)), Operator.NOT]
    operands = len(must) + bool(must_not)
    return Expression((*steps, *[Operator.AND] * (operands - 1)))


def _texts(args: Mapping[str, Any], key: str) -> list[str]:
    texts = _as_list(args.get(key, []))
    if key in args and not (texts and all(isinstance(text, str) and text for text in texts)):
        raise InvalidInputError(f"{key} must be a text, or a list of them.")
    return texts


def _check_mentions(goals: Sequence[GoalParams]) -> None:
    mentioning = [goal.expression for goal in goals if goal.expression.mentions]
    require_single_constraint(len(mentioning))
    texts = [text for e in mentioning for mention in e.mentions for text in mention.texts]
    size = len("".join(texts).encode("utf-8", "replace"))
    if any("\ud800" <= letter <= "\udfff" for text in texts for letter in text):
        raise InvalidInputError(
            "A required or forbidden text has surrogates, which are no characters."
        )
    if len(texts) > MAX_TEXTS or size > MAX_BYTES:
        raise InvalidInputError(
            f"A request has at most {MAX_TEXTS} required or forbidden texts, of {MAX_BYTES} bytes "
            f"together."
        )


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _expression(text: Any) -> Expression:
    if not isinstance(text, str) or not text.strip():
        raise InvalidInputError("goal must be an expression such as 'nontoxic & ~formal'.")
    if len(text) > MAX_CHARACTERS:
        raise InvalidInputError(f"A goal has {MAX_CHARACTERS:,} characters at most.")
    expression = parse_expression(text)
    if sum(not isinstance(step, Operator) for step in expression.steps) > MAX_NAMES:
        raise InvalidInputError(f"A goal names attributes {MAX_NAMES} times at most.")
    return expression


def _numbers(
    args: Mapping[str, Any], key: str, default: float, count: int, limit: float
) -> list[float]:
    """Read one number for each goal; a single number applies to all."""
    value = args.get(key, default)
    values: Sequence[Any] = value if isinstance(value, list) else [value] * count
    if len(values) != count:
        raise InvalidInputError(f"{key} has {len(values)} values, for {count} goals.")
    return [_number(key, number, limit) for number in values]


def _number(key: str, value: Any, limit: float) -> float:
    try:
        number = float("nan") if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    if not isfinite(number) or abs(number) > limit:
        raise InvalidInputError(
            f"{key} must be a number from {-limit:g} to {limit:g}, not {str(value)[:40]!r}."
        )
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
