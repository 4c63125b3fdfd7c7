"""Parse and check the steering parameters of a request, which come from untrusted clients."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any, Self

from foretrace.attribute import Expression, LogitAffine
from foretrace.attribute import parse as parse_expression
from foretrace.attribute.expression import Contains, Operator
from foretrace.errors import InvalidInputError
from foretrace.lookahead.levels import BUDGETS, DEFAULT_LEVEL
from foretrace.steering.goal import require_single_constraint
from foretrace.steering.goal_text import MAX_STRENGTH, MIN_STRENGTH, GoalText, describe_goals

KEYS = (
    "goal",
    "must_contain",
    "must_not_contain",
    "whole_words",
    "ignore_case",
    "strength",
    "level",
    "transform",
    "horizon",
    "neutral_end",
    "after",
    "window",
    "shift",
)
ADMISSION = "foretrace"  # the key of the arguments under which a request's admission travels
CONSTRAINTS = ("must_contain", "must_not_contain")
MAX_GOALS, MAX_CHARACTERS, MAX_NAMES = 4, 1_000, 16
MAX_VALUES = 64  # of one argument, before anything else looks at them
MAX_TEXTS, MAX_BYTES = 16, 200  # of required and forbidden texts: each becomes an automaton
STRENGTH_DIGITS = 2  # significant ones: every strength has its own table
MAX_SCALE, MAX_SHIFT = 1_000.0, 10_000.0


@dataclass(frozen=True)
class SteeringParams:
    """The goals of a request, and options for all of them.

    Without transforms, there is one goal: the conjunction of all expressions and of the required
    and forbidden texts. With transforms, every expression is a goal, and their factors multiply.
    """

    goals: tuple[GoalText, ...]
    horizon: int | None = None
    neutral_end: bool = True
    after: str | None = None
    """The marker after which the goals begin."""
    window: int | str | None = None
    """How many tokens the goals are about, or the marker with which they end."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Return the markers at which the goals begin and end."""
        return tuple(text for text in (self.after, self.window) if isinstance(text, str))

    @property
    def required(self) -> list[list[str]]:
        """Return the required texts: lists of alternatives, of which one must occur."""
        steps = [operand.expression.steps for goal in self.goals for operand in goal.operands]
        alone = [step[0] for step in steps if len(step) == 1]
        return [list(operand.texts) for operand in alone if isinstance(operand, Contains)]


@dataclass(frozen=True)
class Admission:
    """What the decoding process loads for a request: plain values, which vLLM passes on to it."""

    tables: Sequence[str]
    """The key of each goal's table."""
    transforms: Sequence[Sequence[float]]
    """The scale and the shift of each goal's transform."""
    horizon: int | None
    neutral_end: bool
    after: str | None
    window: int | str | None
    markers: Mapping[str, str]
    """The key of each marker's automaton."""
    required: Sequence[Sequence[str]] = ()
    """The required texts: lists of alternatives, of which one must occur."""
    stops: Sequence[int] = ()
    """The stop tokens that were added to the request."""
    leased: bool = False
    """Whether the tables are leased until the request is answered."""

    @property
    def keys(self) -> list[str]:
        """Return the keys of all that must be built."""
        return [*self.tables, *self.markers.values()]

    def to_plain(self) -> dict[str, Any]:
        """Return the values as a dictionary."""
        return asdict(self)

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Self:
        """Read what `to_plain` returned."""
        return cls(**values)


def names_goal(extra_args: Mapping[str, Any] | None) -> bool:
    """Return whether a request has a steering argument, or a misspelt one."""
    return any(key in KEYS or _is_misspelt(key) for key in extra_args or ())


def _is_misspelt(key: Any) -> bool:
    return key != "goal" and isinstance(key, str) and key.lower() in ("goal", "goals")


def parse(extra_args: Mapping[str, Any] | None) -> SteeringParams | None:
    """Parse the extra arguments of a request; arguments of other plugins are ignored.

    Args:
        extra_args: `goal` is an expression or a list of expressions. `strength` is a number for all
            goals, or a list with one for each. `level` is a name. `transform` is a scale and a
            shift for all goals, or a list of them with one pair for each. `after` is a text, and
            `window` is a number of tokens or a text. `must_contain` and `must_not_contain` are
            texts or lists of texts, and `whole_words` and `ignore_case` say how to find them.

    Returns:
        The parameters, or None if the request is not steered.

    Raises:
        InvalidInputError: An argument is not valid.
    """
    args = {key: extra_args[key] for key in KEYS if key in extra_args} if extra_args else {}
    constraints = [key for key in CONSTRAINTS if key in args]
    if "goal" not in args:
        # A misspelt goal must not produce an unsteered text.
        if close := [key for key in extra_args or {} if _is_misspelt(key)]:
            raise InvalidInputError(f"Did you mean goal, where you say {close[0]}?")
        if args and not constraints:
            raise InvalidInputError(f"{next(iter(args))} is given without a goal.")
        if not args:
            return None
    _require_short(args)
    texts = _as_list(args.get("goal", []))
    if not 1 <= len(texts) + bool(constraints) <= MAX_GOALS:
        counted = " and a required or forbidden text" if constraints else ""
        raise InvalidInputError(
            f"A request has 1 to {MAX_GOALS} goals in all, not {len(texts)}{counted}."
        )
    _check_combination(args)
    expressions = [_expression(text) for text in texts]
    goals = _goals(args, expressions)
    _check_contains(goals)
    return SteeringParams(
        goals,
        _horizon(args.get("horizon")),
        _flag(args, "neutral_end", True),
        _marker("after", args["after"]) if "after" in args else None,
        _window(args["window"]) if "window" in args else None,
    )


def _require_short(args: Mapping[str, Any]) -> None:
    """Raise if an argument has too many values or too long a text, in constant time for each."""
    for key, value in args.items():
        values = _as_list(value)
        if len(values) > MAX_VALUES:
            raise InvalidInputError(
                f"{key} has {len(values):,} values, but {MAX_VALUES} are allowed at most."
            )
        for one in values:
            if isinstance(one, str | list | dict) and len(one) > MAX_CHARACTERS:
                raise InvalidInputError(
                    f"{key} has a value of {len(one):,} characters. It may have "
                    f"{MAX_CHARACTERS:,} characters at most."
                )


def _check_combination(args: Mapping[str, Any]) -> None:
    """Raise if arguments exclude each other, or belong to an earlier version."""
    if "shift" in args:
        raise InvalidInputError(
            "shift is no argument any more. Leave it out and choose a level, or write the paper's "
            "transform as transform: [scale, shift]."
        )
    exclusive = [key for key in ("strength", "level", "transform") if key in args]
    if len(exclusive) > 1:
        raise InvalidInputError(
            f"{' and '.join(exclusive)} exclude each other. Use one of strength, level and "
            f"transform."
        )


def _goals(args: Mapping[str, Any], expressions: Sequence[Expression]) -> tuple[GoalText, ...]:
    """Return one conjunction, or with transforms, a goal for each expression."""
    # Without goals, the arguments are checked, and apply to the required and forbidden texts.
    count = len(expressions) or 1
    strengths = _strengths(args["strength"], count) if "strength" in args else [None] * count
    return describe_goals(
        expressions,
        strengths=strengths[: len(expressions)],
        level=_level(args.get("level", DEFAULT_LEVEL)),
        transforms=_transforms(args["transform"], count) if "transform" in args else None,
        must_contain=_texts(args, "must_contain"),
        must_not_contain=_texts(args, "must_not_contain"),
        whole_words=_flag(args, "whole_words", False),
        ignore_case=_flag(args, "ignore_case", False),
    )


def _texts(args: Mapping[str, Any], key: str) -> list[str]:
    texts = _as_list(args.get(key, []))
    if key in args and not (texts and all(isinstance(text, str) and text for text in texts)):
        raise InvalidInputError(f"{key} must be a text, or a list of them.")
    return list(dict.fromkeys(texts))


def _check_contains(goals: Sequence[GoalText]) -> None:
    contains = [goal.contains for goal in goals if goal.contains]
    require_single_constraint(len(contains))
    texts = [text for goal in contains for operand in goal for text in operand.texts]
    size = _num_bytes("".join(texts))
    if size is None:
        raise InvalidInputError(
            "A required or forbidden text has surrogates, which are no characters."
        )
    if len(texts) > MAX_TEXTS or size > MAX_BYTES:
        raise InvalidInputError(
            f"A request has at most {MAX_TEXTS} required or forbidden texts, of {MAX_BYTES} bytes "
            f"together."
        )


def _num_bytes(text: str) -> int | None:
    """Return the length in UTF-8; None if the text has surrogates, which are no characters."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return None


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _expression(text: Any) -> Expression:
    if not isinstance(text, str) or not text.strip():
        raise InvalidInputError("goal must be an expression such as 'nontoxic & ~formal'.")
    expression = parse_expression(text)
    if sum(not isinstance(step, Operator) for step in expression.steps) > MAX_NAMES:
        raise InvalidInputError(f"A goal names attributes {MAX_NAMES} times at most.")
    return expression


def _strengths(value: Any, count: int) -> list[float | None]:
    """Read one strength for each goal, rounded; a single number applies to all."""
    values = value if isinstance(value, list) else [value] * count
    if len(values) != count:
        raise InvalidInputError(f"strength has {len(values)} values, for {count} goals.")
    strengths = [_number("strength", number, MAX_STRENGTH, MIN_STRENGTH) for number in values]
    return [float(f"{strength:.{STRENGTH_DIGITS}g}") for strength in strengths]


def _level(value: Any) -> str:
    if not isinstance(value, str) or value not in BUDGETS:
        raise InvalidInputError(
            f"level must be one of {', '.join(BUDGETS)}, not {str(value)[:40]!r}."
        )
    return value


def _transforms(value: Any, count: int) -> list[LogitAffine]:
    """Read a scale and a shift for each goal; a single pair applies to all.

    Over HTTP, vLLM accepts no nested lists: the pairs may also be written one after the other.
    """
    numbers = _as_list(value)
    if numbers and all(isinstance(pair, list) and len(pair) == 2 for pair in numbers):
        numbers = [number for pair in numbers for number in pair]
    if len(numbers) == 2:
        numbers = numbers * count
    if len(numbers) != 2 * count:
        raise InvalidInputError(
            f"transform must be [scale, shift] for all goals, or a list of {count} such pairs."
        )
    scales = [_number("The scale of a transform", x, MAX_SCALE, 0.0) for x in numbers[::2]]
    shifts = [_number("The shift of a transform", x, MAX_SHIFT) for x in numbers[1::2]]
    if 0.0 in scales:
        raise InvalidInputError("The scale of a transform must be above 0.")
    return [LogitAffine(*pair) for pair in zip(scales, shifts, strict=True)]


def _number(key: str, value: Any, high: float, low: float | None = None) -> float:
    """Read a number from `low` to `high`; by default, `low` is `-high`."""
    low = -high if low is None else low
    try:
        number = float("nan") if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    if not isfinite(number) or not low <= number <= high:
        raise InvalidInputError(
            f"{key} must be a number from {low:g} to {high:g}, not {str(value)[:40]!r}."
        )
    return number


def _horizon(value: Any) -> int | None:
    if value is None:
        return None
    number = _number("horizon", value, 1e6)
    if number < 0 or number != int(number):
        raise InvalidInputError(f"horizon must be a whole number of tokens, not {number:g}.")
    return int(number)


def _marker(key: str, value: Any) -> str:
    size = _num_bytes(value) if isinstance(value, str) else None
    if not size:
        raise InvalidInputError(f"{key} must be a text such as </think>, not {str(value)[:40]!r}.")
    if size > MAX_BYTES:
        raise InvalidInputError(f"{key} may have {MAX_BYTES} bytes. Use a shorter text.")
    return str(value)


def _window(value: Any) -> int | str:
    if isinstance(value, str):
        return _marker("window", value)
    number = _number("window", value, 1e6, 1.0)
    if number != int(number):
        raise InvalidInputError(f"window must be a whole number of tokens, not {number:g}.")
    return int(number)


def _flag(args: Mapping[str, Any], key: str, default: bool) -> bool:
    value = args.get(key, default)
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if value in (0, 1) and not isinstance(value, str):
        return bool(value)
    raise InvalidInputError(f"{key} must be true or false, not {str(value)[:40]!r}.")
