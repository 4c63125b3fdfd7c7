"""Goals as people write them: expressions over names, and texts that must or must not occur."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any

from foretrace.attribute import Attribute, Expression, LogitAffine
from foretrace.attribute.expression import Contains, Operator
from foretrace.errors import InvalidInputError
from foretrace.lookahead.levels import DEFAULT_LEVEL
from foretrace.steering.goal import IDENTITY, Goal

MIN_STRENGTH, MAX_STRENGTH = 0.01, 1_000.0


@dataclass(frozen=True)
class WeightedExpression:
    """An expression over attributes, and how strongly to steer toward it.

    Attributes:
        expression: The expression.
        strength: The exponent of each operand of its outermost `&`. By default, the level decides.
        level: The level of each of these operands, if there is no strength.
    """

    expression: Expression
    strength: float | None = None
    level: str = DEFAULT_LEVEL


@dataclass(frozen=True)
class GoalText:
    """A conjunction of expressions with one lookahead table, and its transform.

    The operands are in normal form: each is an operand of the outermost `&`, and they are sorted.
    Equal goals therefore have equal operands, in whatever order they are given.
    """

    operands: tuple[WeightedExpression, ...]
    transform: LogitAffine = IDENTITY

    @property
    def names(self) -> tuple[str, ...]:
        """Return the distinct names of attributes."""
        return tuple(dict.fromkeys(name for one in self.operands for name in one.expression.names))

    @property
    def contains(self) -> tuple[Contains, ...]:
        """Return the distinct `contains(...)` operands."""
        operands = [one for operand in self.operands for one in operand.expression.contains]
        return tuple(dict.fromkeys(operands))

    def goals(
        self,
        attributes: Mapping[str, Attribute],
        contains: Callable[[Contains], Attribute] | None = None,
        **options: Any,
    ) -> list[Goal]:
        """Return one goal for each operand, or one for all of them if there is a transform.

        Args:
            attributes: The attribute of each name.
            contains: Returns the attribute of a `contains(...)` operand; see `Expression.build`.
            **options: Further arguments of `Goal`.

        Raises:
            InvalidInputError: If an attribute is missing, or a text must occur and must not.
        """
        _require_no_contradiction(self.operands)
        built = [operand.expression.build(attributes, contains) for operand in self.operands]
        if not self.transform.is_identity:
            return [Goal(reduce(and_, built), 1.0, transform=self.transform, **options)]
        return [
            Goal(attribute, operand.strength, operand.level, **options)
            for attribute, operand in zip(built, self.operands, strict=True)
        ]


def describe_goals(
    expressions: Sequence[Expression],
    *,
    strengths: Sequence[float | None] | None = None,
    level: str = DEFAULT_LEVEL,
    transforms: Sequence[LogitAffine] | None = None,
    must_contain: Sequence[str] = (),
    must_not_contain: Sequence[str] = (),
    whole_words: bool = False,
    ignore_case: bool = False,
) -> tuple[GoalText, ...]:
    """Combine expressions, and texts that must or must not occur, into goals.

    Args:
        expressions: The expressions.
        strengths: The strength of each expression. By default, the level decides.
        level: The level of the expressions that have no strength.
        transforms: The transform of each expression, instead of strengths and level. If there are
            no expressions, the transform of the texts.
        must_contain: Texts that must all occur.
        must_not_contain: Texts of which none may occur.
        whole_words: Whether these texts count only where no letter, digit or underscore is next to
            them.
        ignore_case: Whether small and capital letters of these texts are the same.

    Returns:
        One conjunction; with transforms, a goal for each expression and one for the texts.

    Raises:
        InvalidInputError: If there is neither an expression nor a text, or a strength is out of
            range.
    """
    required = None
    if must_contain or must_not_contain:
        required = _constraint(
            [Contains((text,), whole_words, ignore_case) for text in dict.fromkeys(must_contain)],
            Contains(tuple(dict.fromkeys(must_not_contain)), whole_words, ignore_case),
        )
    if not expressions and required is None:
        raise InvalidInputError("There is no goal. Name at least one attribute.")
    if transforms is not None:
        goals = [*expressions] if required is None else [*expressions, required]
        padded = [*transforms, IDENTITY][: len(goals)]
        return tuple(
            GoalText(_operands([WeightedExpression(expression, 1.0)]), transform)
            for expression, transform in zip(goals, padded, strict=True)
        )
    for strength in strengths or ():
        if strength is not None and not MIN_STRENGTH <= strength <= MAX_STRENGTH:
            raise InvalidInputError(
                f"A strength must be a number from {MIN_STRENGTH:g} to {MAX_STRENGTH:g}, not "
                f"{strength:g}. To steer away from an attribute, negate it: ~name."
            )
    weighted = [
        WeightedExpression(expression, strength, level)
        for expression, strength in zip(
            expressions, strengths or [None] * len(expressions), strict=True
        )
    ]
    if required is not None:
        weighted.append(WeightedExpression(required, 1.0))
    return (GoalText(_operands(weighted)),)


def _constraint(must: Sequence[Contains], must_not: Contains) -> Expression:
    """Return the expression that all of `must` occur and none of the texts of `must_not`."""
    steps: list[str | Operator | Contains] = [*must]
    if must_not.texts:
        steps += [must_not, Operator.NOT]
    operands = len(must) + bool(must_not.texts)
    return Expression((*steps, *[Operator.AND] * (operands - 1)))


def _require_no_contradiction(operands: Sequence[WeightedExpression]) -> None:
    """Raise if an operand requires a text that another one forbids."""
    required: list[Contains] = []
    forbidden: list[Contains] = []
    for operand in operands:
        first, *rest = operand.expression.steps
        if isinstance(first, Contains) and rest in ([], [Operator.NOT]):
            (forbidden if rest else required).append(first)
    for one in required:
        if both := [other for other in forbidden if one.contradicts(other)]:
            raise InvalidInputError(
                f"The goals contradict each other: {one} and ~{both[0]}. What must occur includes "
                f"what must not. Change or remove one of them."
            )


def _operands(weighted: Sequence[WeightedExpression]) -> tuple[WeightedExpression, ...]:
    """Return the operands of the conjunction in normal form.

    Constraints are true or false: they have strength 1, and count once. They come first, since they
    combine into a single term.
    """
    operands = [
        WeightedExpression(factor, one.strength, one.level)
        if factor.names
        else WeightedExpression(factor, 1.0)
        for one in weighted
        for factor in one.expression.normalized().factors()
    ]
    constraints = dict.fromkeys(one for one in operands if not one.expression.names)
    graded = [one for one in operands if one.expression.names]
    return tuple(sorted([*constraints, *graded], key=_order))


def _order(operand: WeightedExpression) -> tuple[bool, str, float, str]:
    return (
        bool(operand.expression.names),
        str(operand.expression),
        operand.strength or 0.0,
        operand.level,
    )
