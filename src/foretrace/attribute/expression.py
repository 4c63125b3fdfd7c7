"""Expressions over attributes as text: names joined by `~`, `&`, `|` and parentheses."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from typing import NamedTuple, Protocol, Self, TypeVar

from foretrace.errors import InvalidInputError, UnknownNameError

STRING = r'"(?:[^"\\]|\\.)*"'
WORD = r"[^\W\d][\w.-]*"
TOKEN = re.compile(
    rf"\s*(?:(?:contains|mentions)\s*\((?P<texts>\s*{STRING}(?:\s*,\s*{STRING})*\s*)\)"
    rf'|(?P<name>{WORD})|"(?P<quoted>[^"]+)"|(?P<symbol>[~&|()]))'
)
MAX_LENGTH = 10_000  # characters; bounds the time to parse


class Operator(StrEnum):
    """The operators, in ascending order of precedence."""

    OR = "|"
    AND = "&"
    NOT = "~"

    @property
    def precedence(self) -> int:
        """Return the precedence; the operator with the larger one binds tighter."""
        return list(Operator).index(self)


class Operand(Protocol):
    """A value that the three operators can combine, such as an attribute."""

    def __and__(self, other: Self) -> Self:
        """Return the conjunction."""

    def __or__(self, other: Self) -> Self:
        """Return the disjunction."""

    def __invert__(self) -> Self:
        """Return the complement."""


OperandT = TypeVar("OperandT", bound=Operand)


@dataclass(frozen=True)
class Contains:
    """The operand `contains("...", ...)`: the text contains at least one of these substrings.

    Attributes:
        texts: The substrings.
    """

    texts: tuple[str, ...]

    def __str__(self) -> str:
        return f"contains({', '.join(map(json.dumps, self.texts))})"


@dataclass(frozen=True)
class Expression:
    """A parsed expression, in postfix order.

    Attributes:
        steps: Names, contains and operators. An operator applies to the results before it.

    Example:
        >>> from foretrace.attribute import parse
        >>> parse("nontoxic & ~rude").names
        ('nontoxic', 'rude')
    """

    steps: tuple[str | Operator | Contains, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the distinct names of attributes, in order of appearance."""
        operands = (step for step in self.steps if not isinstance(step, Operator))
        return tuple(dict.fromkeys(step for step in operands if isinstance(step, str)))

    @property
    def contains(self) -> tuple[Contains, ...]:
        """Return the distinct `contains(...)` operands, in order of appearance."""
        return tuple(dict.fromkeys(step for step in self.steps if isinstance(step, Contains)))

    def build(
        self,
        attributes: Mapping[str, OperandT],
        contains: Callable[[Contains], OperandT] | None = None,
    ) -> OperandT:
        """Evaluate the expression.

        Args:
            attributes: The attribute of each name.
            contains: Returns the attribute of a `contains(...)` operand, such as
                `lambda operand: foretrace.contains(operand.texts, tokenizer)`.

        Returns:
            The combined attribute.

        Raises:
            InvalidInputError: If an attribute is missing, or `contains` is missing and needed.

        Example:
            >>> from foretrace.attribute import parse
            >>> parse("~nontoxic").build({"nontoxic": attribute}).name
            '~nontoxic'
        """
        missing = [name for name in self.names if name not in attributes]
        if missing:
            raise unknown_names(missing, attributes)
        if self.contains and contains is None:
            raise InvalidInputError(
                f"{self.contains[0]} needs a tokenizer, and there is none here. Use names only."
            )
        operands: dict[str | Contains, OperandT] = {name: attributes[name] for name in self.names}
        operands |= {step: contains(step) for step in self.contains if contains is not None}
        stack: list[OperandT] = []
        for step in self.steps:
            if step is Operator.NOT:
                stack.append(~stack.pop())
            elif isinstance(step, Operator):
                right, left = stack.pop(), stack.pop()
                stack.append(left & right if step is Operator.AND else left | right)
            else:
                stack.append(operands[step])
        return stack[0]

    def normalized(self) -> "Expression":
        """Return the normal form, the same for every order and grouping of operands.

        Operands of `&` and `|` are flattened and sorted, without double negations. The probability
        of the attribute does not change, up to rounding. Operands that occur twice
        stay: `a & a` is not `a`.

        Returns:
            The normal form. It is suitable as a cache key.

        Example:
            >>> from foretrace.attribute import parse
            >>> str(parse("c & ~~(b & a)").normalized())
            '((a & b) & c)'
        """
        stack: list[_Chain | _Node] = []
        for step in self.steps:
            if step is Operator.NOT:
                stack.append(_complement(stack.pop()))
            elif isinstance(step, Operator):
                right, left = stack.pop(), stack.pop()
                stack.append(_Chain(step, (*_operands(left, step), *_operands(right, step))))
            else:
                stack.append(_leaf(step))
        return Expression(_close(stack[0]).steps)

    def factors(self) -> "tuple[Expression, ...]":
        """Return the operands of the outermost `&`: the expression itself if there is none.

        Returns:
            The operands, in order of appearance.

        Example:
            >>> from foretrace.attribute import parse
            >>> [str(factor) for factor in parse("a & (b | c) & ~d").factors()]
            ['a', '(b | c)', '~d']
        """
        stack: list[list[tuple[str | Operator | Contains, ...]]] = []
        for step in self.steps:
            if step is Operator.NOT:
                stack.append([(*_joined(stack.pop()), step)])
            elif step is Operator.AND:
                right, left = stack.pop(), stack.pop()
                stack.append(left + right)
            elif step is Operator.OR:
                right, left = stack.pop(), stack.pop()
                stack.append([(*_joined(left), *_joined(right), step)])
            else:
                stack.append([(step,)])
        return tuple(Expression(steps) for steps in stack[0])

    def __str__(self) -> str:
        """Return the expression as text, in parentheses, which `parse` reads back."""
        stack: list[str] = []
        for step in self.steps:
            if step is Operator.NOT:
                stack.append(f"~{stack.pop()}")
            elif isinstance(step, Operator):
                right, left = stack.pop(), stack.pop()
                stack.append(f"({left} {step} {right})")
            else:
                stack.append(_leaf_text(step))
        return stack[0]


def unknown_names(names: Sequence[str], known: Iterable[str]) -> UnknownNameError:
    """Return the error that no attribute has these names, with the most similar known name."""
    similar = get_close_matches(names[0], known, n=1)
    hint = f"Did you mean {similar[0]}?" if similar else "Check the spelling, or fit it."
    return UnknownNameError(f"There is no attribute called {', '.join(names)}. {hint}")


def _joined(
    factors: Sequence[tuple[str | Operator | Contains, ...]],
) -> tuple[str | Operator | Contains, ...]:
    """Return the steps of the conjunction of factors."""
    steps = [*factors[0]]
    for factor in factors[1:]:
        steps += [*factor, Operator.AND]
    return tuple(steps)


@dataclass(frozen=True)
class _Node:
    """A subexpression in normal form."""

    steps: tuple[str | Operator | Contains, ...]
    text: str
    has_names: bool
    negated: "_Chain | _Node | None" = None  # the operand, if this is a complement


class _Chain(NamedTuple):
    """Operands of one associative and commutative operator, not sorted yet."""

    operator: Operator
    operands: tuple[_Node, ...]


def _leaf(step: str | Contains) -> _Node:
    if isinstance(step, Contains):
        step = Contains(tuple(sorted(set(step.texts))))
    return _Node((step,), _leaf_text(step), isinstance(step, str))


def _leaf_text(step: str | Contains) -> str:
    return as_expression(step) if isinstance(step, str) else str(step)


def _complement(operand: _Chain | _Node) -> _Chain | _Node:
    """Return the complement; that of a complement is its operand."""
    if isinstance(operand, _Node) and operand.negated is not None:
        return operand.negated
    node = _close(operand)
    return _Node((*node.steps, Operator.NOT), f"~{node.text}", node.has_names, operand)


def _operands(operand: _Chain | _Node, operator: Operator) -> tuple[_Node, ...]:
    """Return the operands of a chain of the same operator; anything else is one operand."""
    if isinstance(operand, _Chain) and operand.operator is operator:
        return operand.operands
    return (_close(operand),)


def _close(operand: _Chain | _Node) -> _Node:
    """Return the normal form: sort the operands of a chain, and join them from the left.

    Operands without names come first: constraints combine into a single term.
    """
    if isinstance(operand, _Node):
        return operand
    nodes = sorted(operand.operands, key=lambda node: (node.has_names, node.text))
    steps = [*nodes[0].steps]
    for node in nodes[1:]:
        steps += [*node.steps, operand.operator]
    text = f"({f' {operand.operator} '.join(node.text for node in nodes)})"
    return _Node(tuple(steps), text, any(node.has_names for node in nodes))


def parse(text: str) -> Expression:
    """Parse an expression; `~` binds tightest, then `&`, then `|`.

    Names are words (`nontoxic`, `user-17`) or are in double quotes (`"Twilight Sparkle"`).
    `contains("refund", "money back")` means that the text contains one of these substrings. They
    are written as in JSON.

    Args:
        text: The expression.

    Returns:
        The parsed expression.

    Raises:
        InvalidInputError: If the text is malformed or too long.

    Example:
        >>> import foretrace as ft
        >>> ft.parse('nontoxic & ~"small talk"').names
        ('nontoxic', 'small talk')
    """
    return _Parser(text).parse()


def as_expression(name: str) -> str:
    """Return the expression that consists of one name: in quotes, unless the name is a word.

    Args:
        name: The name of an attribute.

    Returns:
        The expression.

    Example:
        >>> from foretrace.attribute import as_expression
        >>> as_expression("small talk")
        '"small talk"'
    """
    return name if re.fullmatch(WORD, name) else f'"{name}"'


class _Parser:
    """A shunting-yard parser: not recursive, so nesting is not limited."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_LENGTH:
            raise InvalidInputError(
                f"The expression has {len(text):,} characters; it may have {MAX_LENGTH:,} "
                f"characters at most. Use a shorter one."
            )
        self.text = text
        self.steps: list[str | Operator | Contains] = []
        self.operators: list[Operator | None] = []  # None is an open parenthesis
        self.expects_operand = True

    def parse(self) -> Expression:
        """Parse the text."""
        end = len(self.text.rstrip())
        position = 0
        while position < end:
            match = TOKEN.match(self.text, position)
            if match is None:
                position = end - len(self.text[position:end].lstrip())
                raise self._unexpected(self.text[position], position)
            position = match.end()
            token = match[0].lstrip()
            self._read(match, token, position - len(token))
        if self.expects_operand:
            raise self._malformed("it ends where a name was expected")
        self._pop_operators(0)
        if self.operators:
            raise self._malformed("a parenthesis is not closed")
        return Expression(tuple(self.steps))

    def _read(self, match: re.Match[str], token: str, position: int) -> None:
        if self.expects_operand != (token in "~(" or not match["symbol"]):
            raise self._unexpected(token, position)
        if not match["symbol"]:
            self.steps.append(self._operand(match, token))
            self.expects_operand = False
        elif token == "(":
            self.operators.append(None)
        elif token == ")":
            self._pop_operators(0)
            if not self.operators:
                raise self._unexpected(token, position)
            self.operators.pop()
        else:
            operator = Operator(token)
            if operator is not Operator.NOT:
                self._pop_operators(operator.precedence)
                self.expects_operand = True
            self.operators.append(operator)

    def _operand(self, match: re.Match[str], token: str) -> str | Contains:
        if match["texts"] is None:
            return match["name"] or match["quoted"]
        try:
            return Contains(tuple(json.loads(f"[{match['texts']}]")))
        except ValueError:
            raise self._malformed(f"the strings of {token} are not valid JSON") from None

    def _pop_operators(self, precedence: int) -> None:
        """Output the operators of at least this precedence, up to an open parenthesis."""
        while self.operators and (last := self.operators[-1]) and last.precedence >= precedence:
            self.steps.append(last)
            self.operators.pop()

    def _unexpected(self, token: str, position: int) -> InvalidInputError:
        return self._malformed(f"unexpected '{token}' at column {position + 1}")

    def _malformed(self, problem: str) -> InvalidInputError:
        return InvalidInputError(
            f"'{self.text}' is not an expression: {problem}. Join names by & and |, with ~ for "
            f"not: nontoxic & ~(political | rude)."
        )
