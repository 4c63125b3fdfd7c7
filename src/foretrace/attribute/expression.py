"""Goals as text: names joined by `~`, `&`, `|` and parentheses, as in Python."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from typing import Protocol, Self, TypeVar

from foretrace.errors import InvalidInputError

STRING = r'"(?:[^"\\]|\\.)*"'
WORD = r"[^\W\d][\w.-]*"
TOKEN = re.compile(
    rf"\s*(?:mentions\s*\((?P<texts>\s*{STRING}(?:\s*,\s*{STRING})*\s*)\)"
    rf'|(?P<name>{WORD})|"(?P<quoted>[^"]+)"|(?P<sign>[~&|()]))'
)
LONGEST = 10_000  # characters: more than anybody writes, and soon parsed


class Sign(StrEnum):
    """What combines attributes; later ones bind closer."""

    OR = "|"
    AND = "&"
    NOT = "~"

    @property
    def precedence(self) -> int:
        """The greater, the closer it binds."""
        return list(Sign).index(self)


class Operand(Protocol):
    """What can be combined: attributes, or anything else that knows the three signs."""

    def __and__(self, other: Self) -> Self:
        """Both."""

    def __or__(self, other: Self) -> Self:
        """Either."""

    def __invert__(self) -> Self:
        """Not."""


Kind = TypeVar("Kind", bound=Operand)


@dataclass(frozen=True)
class Mention:
    """That a text contains one of these."""

    texts: tuple[str, ...]

    def __str__(self) -> str:
        return f"mentions({', '.join(map(json.dumps, self.texts))})"


@dataclass(frozen=True)
class Expression:
    """A parsed expression: names, mentions and signs in postfix order."""

    steps: tuple[str | Sign | Mention, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names that occur, each once, in order."""
        operands = (step for step in self.steps if not isinstance(step, Sign))
        return tuple(dict.fromkeys(each for each in operands if isinstance(each, str)))

    @property
    def mentions(self) -> tuple[Mention, ...]:
        """What a text is to contain, or not; each once, in order."""
        return tuple(dict.fromkeys(step for step in self.steps if isinstance(step, Mention)))

    def build(
        self, attributes: Mapping[str, Kind], mention: Callable[[Mention], Kind] | None = None
    ) -> Kind:
        """Combine the attributes of these names, and those that `mention` makes."""
        missing = [name for name in self.names if name not in attributes]
        if missing:
            like = get_close_matches(missing[0], attributes, n=1)
            hint = f"Did you mean {like[0]}?" if like else "Check the spelling, or fit it."
            raise InvalidInputError(f"There is no attribute called {', '.join(missing)}. {hint}")
        if self.mentions and mention is None:
            raise InvalidInputError(f"{self.mentions[0]} needs a tokenizer: not to be had here.")
        known: dict[str | Mention, Kind] = {name: attributes[name] for name in self.names}
        known |= {each: mention(each) for each in self.mentions if mention is not None}
        stack: list[Kind] = []
        for step in self.steps:
            if step is Sign.NOT:
                stack.append(~stack.pop())
            elif isinstance(step, Sign):
                right, left = stack.pop(), stack.pop()
                stack.append(left & right if step is Sign.AND else left | right)
            else:
                stack.append(known[step])
        return stack[0]


def parse(text: str) -> Expression:
    """Parse an expression; `~` binds closest, then `&`, then `|`.

    Names are words (`nontoxic`, `user-17`), or stand in double quotes (`"Twilight Sparkle"`).
    `mentions("refund", "money back")` is that a text contains one of these, written as in JSON.
    """
    return _Parser(text).whole()


def as_expression(name: str) -> str:
    """Write the name of an attribute so that it is read as one: in quotes, unless it is a word."""
    return name if re.fullmatch(WORD, name) else f'"{name}"'


class _Parser:
    """Shunting-yard: signs wait until what binds closer is done. No recursion, so no depth."""

    def __init__(self, text: str) -> None:
        if len(text) > LONGEST:
            raise InvalidInputError(f"An expression may have {LONGEST:,} characters at most.")
        self.text = text
        self.steps: list[str | Sign | Mention] = []
        self.waiting: list[Sign | None] = []  # None is an open parenthesis
        self.wants_operand = True

    def whole(self) -> Expression:
        """Read everything."""
        place = 0
        end = len(self.text.rstrip())
        while place < end:
            found = TOKEN.match(self.text, place)
            if found is None:
                rest = self.text[place:].lstrip()
                raise self._malformed(f"'{rest[0]}' is not understood")
            place = found.end()
            if found["sign"]:
                self._take_sign(found["sign"])
            else:
                self._expect(found[0].strip(), operand=True)
                self.steps.append(self._operand(found))
                self.wants_operand = False
        if self.wants_operand:
            raise self._malformed("it ends where a name was expected")
        self._release(-1)
        if self.waiting:
            raise self._malformed("a parenthesis is not closed")
        return Expression(tuple(self.steps))

    def _operand(self, found: re.Match[str]) -> str | Mention:
        if found["texts"] is None:
            return found["name"] or found["quoted"]
        try:
            return Mention(tuple(json.loads(f"[{found['texts']}]")))
        except ValueError:
            raise self._malformed(f"{found[0].strip()} is not written as in JSON") from None

    def _take_sign(self, sign: str) -> None:
        self._expect(sign, operand=sign in "~(")
        if sign == "(":
            self.waiting.append(None)
        elif sign == ")":
            self._release(-1)
            if not self.waiting:
                raise self._malformed("a parenthesis is closed that was not opened")
            self.waiting.pop()
        else:
            read = Sign(sign)
            if read is not Sign.NOT:
                self._release(read.precedence)
                self.wants_operand = True
            self.waiting.append(read)

    def _expect(self, token: str, *, operand: bool) -> None:
        if operand != self.wants_operand:
            raise self._malformed(f"'{token}' stands where it cannot")

    def _release(self, precedence: int) -> None:
        """Let the signs go that bind at least as close, up to an open parenthesis."""
        while self.waiting and (last := self.waiting[-1]) and last.precedence >= precedence:
            self.steps.append(last)
            self.waiting.pop()

    def _malformed(self, why: str) -> InvalidInputError:
        return InvalidInputError(
            f"'{self.text}' is not an expression: {why}. Write names joined by & and |, with ~ "
            f"for not: nontoxic & ~(political | rude)."
        )
