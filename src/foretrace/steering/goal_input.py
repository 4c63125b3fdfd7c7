"""Goals in any form that people pass: an expression, an attribute or a goal, with options."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

from foretrace.attribute import Attribute, parse
from foretrace.attribute.expression import Contains
from foretrace.errors import InvalidInputError
from foretrace.lookahead.levels import DEFAULT_LEVEL
from foretrace.steering.goal import Goal
from foretrace.steering.goal_text import describe_goals

GoalInput = str | Attribute | Goal | None
"""An expression over names of attributes, an attribute, or a goal; None for no goal."""


class GoalOptions(TypedDict, total=False):
    """How strongly to steer, and which texts must or must not occur."""

    level: str
    """`mild`, `medium` (the default) or `strong`. A `Goal` has its own."""
    strength: float | None
    """The exponent of the attributes, instead of a level. A `Goal` has its own."""
    must_contain: str | Sequence[str]
    """Texts that must all occur."""
    must_not_contain: str | Sequence[str]
    """Texts of which none may occur."""
    whole_words: bool
    """Whether these texts count only where no letter, digit or underscore is next to them."""
    ignore_case: bool
    """Whether small and capital letters of these texts are the same."""


class ReadGoal(NamedTuple):
    """The goals of one text."""

    goals: list[Goal]
    attributes: dict[str, Attribute]
    """The attributes that were named or passed, by name."""


def read_goal(
    goal: GoalInput,
    attributes: Mapping[str, Attribute],
    contains: Callable[[Contains], Attribute],
    *,
    level: str = DEFAULT_LEVEL,
    strength: float | None = None,
    must_contain: str | Sequence[str] = (),
    must_not_contain: str | Sequence[str] = (),
    whole_words: bool = False,
    ignore_case: bool = False,
) -> ReadGoal:
    """Return the goals to compile for one text; none if nothing is wanted.

    Args:
        goal: The goal.
        attributes: The attribute of each name.
        contains: Returns the attribute of a `contains(...)` operand.
        level: See `GoalOptions`.
        strength: See `GoalOptions`.
        must_contain: See `GoalOptions`.
        must_not_contain: See `GoalOptions`.
        whole_words: See `GoalOptions`.
        ignore_case: See `GoalOptions`.

    Raises:
        InvalidInputError: If the goal is not as described, or an attribute is missing.
    """
    if not isinstance(goal, str | Attribute | Goal | None):
        raise InvalidInputError(
            f"A goal is an expression such as 'positive & ~political', an Attribute or a Goal, not "
            f"a {type(goal).__name__}."
        )
    must, must_not = (
        (texts,) if isinstance(texts, str) else tuple(texts)
        for texts in (must_contain, must_not_contain)
    )
    expressions = [parse(goal)] if isinstance(goal, str) else []
    if isinstance(goal, Attribute):
        goal = Goal(goal, strength, level)
    own = [goal] if isinstance(goal, Goal) else []
    named = {one.attribute.name: one.attribute for one in own}
    window: dict[str, Any] = {
        key: getattr(one, key) for one in own for key in ("neutral_end", "after", "window")
    }
    if not (expressions or must or must_not):
        return ReadGoal(own, named)
    (described,) = describe_goals(
        expressions,
        strengths=[strength] * len(expressions),
        level=level,
        must_contain=must,
        must_not_contain=must_not,
        whole_words=whole_words,
        ignore_case=ignore_case,
    )
    goals = [*described.goals(attributes, contains, **window), *own]
    return ReadGoal(goals, named | {name: attributes[name] for name in described.names})
