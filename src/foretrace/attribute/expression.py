"""Expressions over attributes as text: names joined by `~`, `&`, `|` and parentheses."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import StrEnum
from typing import NamedTuple, Protocol, Self, TypeVar

from foretrace.attribute.substring import ByteAutomaton, byte_automaton
from foretrace.errors import InvalidInputError, UnknownNameError

STRING = r'"(?:[^"\\]|\\.)*"'
WORD = r"[^\W\d][\w.-]*"
OPTION = r"(?:whole_word|ignore_case)\s*=\s*(?i:true|false)"
TOKEN = re.compile(
    rf"\s*(?:(?:contains|mentions)\s*\((?P<texts>\s*{STRING}(?:\s*,\s*{STRING})*\s*)"
    rf"(?P<options>(?:,\s*{OPTION}\s*)*)\)"
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
        """Return the negation."""


OperandT = TypeVar("OperandT", bound=Operand)
Folded = TypeVar("Folded")


@dataclass(frozen=True)
class Contains:
    """The operand `contains("...", ...)`: the text contains at least one of these substrings.

    Attributes:
        texts: The substrings.
        whole_word: Whether no letter, digit or underscore may be next to a substring.
        ignore_case: Whether small and capital letters are the same.
    """

    texts: tuple[str, ...]
    whole_word: bool = False
    ignore_case: bool = False

    def __str__(self) -> str:
        options = [name for name in ("whole_word", "ignore_case") if getattr(self, name)]
        values = [*map(json.dumps, self.texts), *(f"{name}=True" for name in options)]
        return f"contains({', '.join(values)})"

    @property
    def automaton(self) -> ByteAutomaton:
        """Build the automaton that finds the substrings in bytes."""
        return byte_automaton(self.texts, whole_word=self.whole_word, ignore_case=self.ignore_case)

    @property
    def num_states(self) -> int:
        """Return how many states an automaton over tokens has at most."""
        return len(self.automaton.table)

    def contradicts(self, forbidden: "Contains") -> bool:
        """Return whether every text with one of the substrings has a forbidden one, too."""
        automaton = forbidden.automaton
        around = ("",) if self.whole_word else ("x", "y")  # what may be next to a substring
        return all(
            automaton.accepts(f"{other}{one}{other}")
            for text in self.texts
            for one in ({text, text.lower(), text.upper()} if self.ignore_case else {text})
            for other in around
        )


Steps = tuple[str | Operator | Contains, ...]


@dataclass(frozen=True)
class Expression:
    """A parsed expression, in postfix order.

    Attributes:
        steps: Names, `contains(...)` and operators. An operator applies to the results before it.

    Example:
        >>> from foretrace.attribute import parse
        >>> parse("nontoxic & ~rude").names
        ('nontoxic', 'rude')
    """

    steps: Steps

    @property
    def names(self) -> tuple[str, ...]:
        """Return the distinct names of attributes, in order of appearance."""
        names = (step for step in self.steps if not isinstance(step, Operator | Contains))
        return tuple(dict.fromkeys(names))

    @property
    def wanted(self) -> frozenset[str]:
        """Return the names of attributes that texts shall have: not those under a negation."""
        signs = self._fold(
            lambda step: frozenset() if isinstance(step, Contains) else frozenset({(step, True)}),
            lambda names: frozenset((name, not sign) for name, sign in names),
            lambda _operator, left, right: left | right,
        )
        return frozenset(name for name, sign in signs if sign)

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
                `TokenBytes.of(tokenizer).contains`.

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

        def negate(operand: OperandT) -> OperandT:
            return ~operand

        def join(operator: Operator, left: OperandT, right: OperandT) -> OperandT:
            return left & right if operator is Operator.AND else left | right

        return self._fold(operands.__getitem__, negate, join)

    def _fold(
        self,
        leaf: Callable[[str | Contains], Folded],
        negate: Callable[[Folded], Folded],
        join: Callable[[Operator, Folded, Folded], Folded],
    ) -> Folded:
        """Evaluate the steps with a value for each leaf, and functions for the operators."""
        stack: list[Folded] = []
        for step in self.steps:
            if step is Operator.NOT:
                stack.append(negate(stack.pop()))
            elif isinstance(step, Operator):
                right, left = stack.pop(), stack.pop()
                stack.append(join(step, left, right))
            else:
                stack.append(leaf(step))
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
        return Expression(_close(self._fold(_leaf, _negated, _chained)).steps)

    def factors(self) -> "tuple[Expression, ...]":
        """Return the operands of the outermost `&`: the expression itself if there is none.

        Returns:
            The operands, in order of appearance.

        Example:
            >>> from foretrace.attribute import parse
            >>> [str(factor) for factor in parse("a & (b | c) & ~d").factors()]
            ['a', '(b | c)', '~d']
        """

        def leaf(step: str | Contains) -> list[Steps]:
            return [(step,)]

        def negate(factors: list[Steps]) -> list[Steps]:
            return [(*_conjunction(factors), Operator.NOT)]

        def join(operator: Operator, left: list[Steps], right: list[Steps]) -> list[Steps]:
            if operator is Operator.AND:
                return left + right
            return [(*_conjunction(left), *_conjunction(right), operator)]

        return tuple(Expression(steps) for steps in self._fold(leaf, negate, join))

    def __str__(self) -> str:
        """Return the expression as text, in parentheses, which `parse` reads back."""
        return self._fold(
            _leaf_text,
            lambda operand: f"~{operand}",
            lambda operator, left, right: f"({left} {operator} {right})",
        )


def unknown_names(names: Sequence[str], known: Iterable[str]) -> UnknownNameError:
    """Return the error that no attribute has these names, with the most similar known name."""
    similar = get_close_matches(names[0], known, n=1)
    hint = f"Did you mean {similar[0]}?" if similar else "Check the spelling, or fit it."
    return UnknownNameError(f"There is no attribute called {', '.join(names)}. {hint}")


def _conjunction(factors: Sequence[Steps]) -> Steps:
    """Return the steps of the conjunction of factors."""
    return (*factors[0], *(step for factor in factors[1:] for step in (*factor, Operator.AND)))


@dataclass(frozen=True)
class _Node:
    """A subexpression in normal form."""

    steps: Steps
    text: str
    has_names: bool
    negated: "_Chain | _Node | None" = None  # the operand, if this is a negation


class _Chain(NamedTuple):
    """Operands of one associative and commutative operator, not sorted yet."""

    operator: Operator
    operands: tuple[_Node, ...]


def _leaf(step: str | Contains) -> _Node:
    if isinstance(step, Contains):
        step = replace(step, texts=tuple(sorted(set(step.texts))))
    return _Node((step,), _leaf_text(step), isinstance(step, str))


def _leaf_text(step: str | Contains) -> str:
    return as_expression(step) if isinstance(step, str) else str(step)


def _negated(operand: _Chain | _Node) -> _Chain | _Node:
    """Return the negation; if the operand is a negation, return what it negates."""
    if isinstance(operand, _Node) and operand.negated is not None:
        return operand.negated
    node = _close(operand)
    return _Node((*node.steps, Operator.NOT), f"~{node.text}", node.has_names, operand)


def _chained(operator: Operator, *operands: _Chain | _Node) -> _Chain:
    """Join two operands; take over the operands of chains of the same operator."""
    nodes: list[_Node] = []
    for operand in operands:
        if isinstance(operand, _Chain) and operand.operator is operator:
            nodes += operand.operands
        else:
            nodes.append(_close(operand))
    return _Chain(operator, tuple(nodes))


def _close(operand: _Chain | _Node) -> _Node:
    """Return the normal form: sort the operands of a chain, and join them from the left.

    Operands without names come first: constraints combine into a single term.
    """
    if isinstance(operand, _Node):
        return operand
    nodes = sorted(operand.operands, key=lambda node: (node.has_names, node.text))
    rest = (step for node in nodes[1:] for step in (*node.steps, operand.operator))
    text = f"({f' {operand.operator} '.join(node.text for node in nodes)})"
    return _Node((*nodes[0].steps, *rest), text, any(node.has_names for node in nodes))


def parse(text: str) -> Expression:
    """Parse an expression; `~` binds tightest, then `&`, then `|`.

    Names are words (`nontoxic`, `user-17`) or are in double quotes (`"Twilight Sparkle"`).
    `contains("refund", "money back")` means that the text contains one of these substrings. They
    are written as in JSON. `whole_word=True` and `ignore_case=True` may follow them.

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
        options = re.findall(r"(\w+)\s*=\s*(\w+)", match["options"])
        flags = {name: value.lower() == "true" for name, value in options}
        try:
            return Contains(tuple(json.loads(f"[{match['texts']}]")), **flags)
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
