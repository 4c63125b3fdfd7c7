"""The conjunction of several goals: one product, and so one lookahead table for all of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_

from foretrace.attribute import Attribute, Expression
from foretrace.attribute.expression import Contains
from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM
from foretrace.lookahead.levels import DEFAULT_LEVEL, at_level


@dataclass(frozen=True)
class WeightedExpression:
    """An expression over attributes, and how strongly to steer toward it.

    Attributes:
        expression: The expression.
        strength: The exponent of each operand of its outermost `&`. By default, that of the level.
        level: The level of each of these operands, if there is no strength.
    """

    expression: Expression
    strength: float | None = None
    level: str = DEFAULT_LEVEL

    def factors(
        self,
        attributes: Mapping[str, Attribute],
        contains: Callable[[Contains], Attribute] | None,
        hmm: HMM,
    ) -> list[Attribute]:
        """Build the operands of the outermost `&`, each to the power of its strength."""
        factors = [factor.build(attributes, contains) for factor in self.expression.factors()]
        if self.strength is None:
            return [at_level(factor, self.level, hmm) for factor in factors]
        return [factor**self.strength for factor in factors]


def conjunction(
    expressions: Sequence[WeightedExpression],
    attributes: Mapping[str, Attribute],
    contains: Callable[[Contains], Attribute] | None,
    hmm: HMM,
) -> Attribute:
    """Build the conjunction of expressions.

    Args:
        expressions: One expression or more.
        attributes: The attribute of each name.
        contains: Returns the attribute of a `contains(...)` operand; see `Expression.build`.
        hmm: The HMM that finds the strength of levels of attributes that were not calibrated.

    Returns:
        The attribute. Steer toward it with strength 1: the strengths are included.

    Raises:
        InvalidInputError: If an attribute is missing, or an operand has no strength.
    """
    if not expressions:
        raise InvalidInputError("There is no goal. Name at least one attribute.")
    factors = [
        factor
        for expression in expressions
        for factor in expression.factors(attributes, contains, hmm)
    ]
    return reduce(and_, factors)
