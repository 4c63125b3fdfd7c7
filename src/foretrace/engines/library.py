"""Attributes of a folder as lookahead tables: built once, kept on disk and in memory.

Whoever admits a request builds what it asks for, and whoever decodes it reads that: an attribute
that is met for the first time holds up nobody else, and one that is removed or replaced after a
request was admitted changes nothing for it.
"""

import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, lru_cache
from pathlib import Path
from threading import Lock
from time import perf_counter

from foretrace.attribute import Attribute, AttributeStore, Expression
from foretrace.engines.asked import Asked
from foretrace.engines.shelf import Shelf
from foretrace.engines.spelling import Spelling
from foretrace.errors import ForetraceError, InvalidFileError, InvalidInputError
from foretrace.hmm import HMM
from foretrace.lookahead import Goal, Lookahead

logger = logging.getLogger(__name__)

VERSION = 2  # of the tables: others are not read
MOST_TERMS = 64  # of a request: every term has its own table, and its own share of a step
MOST_STATES, MOST_TABLES = 64, 256  # of an automaton, and of that for all terms: each has a table
MOST_REMEMBERED = 4_096  # small facts about requests that came before
MOST_COMPARED = 2_000  # names, when one is misspelt


class Library:
    """An HMM, a folder of attributes, and a folder of tables; used by many threads."""

    def __init__(
        self,
        hmm: HMM,
        attributes: Path,
        tables: Path,
        *,
        horizon: int = 64,
        memory: int = 1 << 30,
        disk: int = 8 << 30,
        spelled: Callable[[], Spelling] | None = None,
        observe: Callable[[str, float], None] = lambda event, value: None,
    ) -> None:
        """Open the folders.

        `memory` and `disk` are budgets in bytes; `spelled` gives what tokens stand for, when a
        request says what must occur; `observe` is told of hits and builds.
        """
        self.hmm, self.horizon = hmm, horizon
        self.store = AttributeStore(
            attributes, tokenizer_fingerprint=hmm.config.tokenizer_fingerprint
        )
        self.memory, self.observe = memory, observe
        self.shelf = Shelf(tables, disk)
        self._spelled = None if spelled is None else cache(_once(spelled))
        self._refusals: OrderedDict[tuple[str, int], str] = OrderedDict()
        self._fewest = lru_cache(MOST_REMEMBERED)(self._count_fewest)
        self._identity = [VERSION, hmm.identity(), hmm.config.eos_token_ids, horizon]
        self._kept: OrderedDict[str, Lookahead] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()
        self._building: dict[str, Lock] = {}
        self._listed: tuple[int, list[str]] = (0, [])

    def admit(self, asked: Asked) -> list[str]:
        """Make sure that the tables of a request are there; give the key of each goal."""
        if asked.horizon is not None and asked.horizon > self.horizon:
            raise InvalidInputError(
                f"This server looks {self.horizon} tokens ahead at most, not {asked.horizon}."
            )
        keys = [self._key(goal.expression) for goal in asked.goals]
        for key, goal in zip(keys, asked.goals, strict=True):
            if not self.shelf.has(key):
                self._build_once(key, goal.expression, MOST_TERMS // len(keys))
        return keys

    def require_room(self, keys: Sequence[str], limit: int | None) -> None:
        """Raise unless what must occur, in one goal at most, fits into so many tokens."""
        needs = [fewest for key in keys if (fewest := self._fewest(key)) is not None]
        if len(needs) > 1:
            raise InvalidInputError(
                "Two goals say what must occur or must not. Join them by & to one."
            )
        if limit is not None and needs and needs[0] > limit:
            raise InvalidInputError(
                f"What must occur takes {needs[0]} tokens at least, and the text may have {limit}. "
                f"Let it be longer."
            )

    def _count_fewest(self, key: str) -> int | None:
        """Count the tokens that a goal takes at least; None if nothing must occur, or must not."""
        memory = self.shelf.attribute(key).terms.memory
        return None if memory is None else int(memory.fewest(self.hmm.vocab_size)[0])

    def goals(self, asked: Asked, keys: list[str]) -> tuple[Goal, ...]:
        """Give what an admitted request asks for; the tables are read if they are not in memory."""
        return tuple(
            Goal(
                self._lookahead(key, goal.expression), goal.strength, goal.shift, asked.neutral_end
            )
            for key, goal in zip(keys, asked.goals, strict=True)
        )

    def _key(self, expression: Expression) -> str:
        """Name a table by all that decides it: the HMM, the expression, the attributes' files."""
        files = []
        for name in expression.names:
            try:
                found = self.store.path(name).stat()
            except (OSError, ValueError):
                raise self._unknown(name) from None
            files.append((name, found.st_mtime_ns, found.st_size, found.st_ino))
        spelling = self._spelling().identity if expression.mentions else None
        given = json.dumps([self._identity, [*map(str, expression.steps)], files, spelling])
        return hashlib.sha256(given.encode("utf-8", "surrogatepass")).hexdigest()

    def _unknown(self, name: str) -> InvalidInputError:
        names = [each for each in self.names() if abs(len(each) - len(name)) <= 3]
        like = get_close_matches(name[:100], names[:MOST_COMPARED], n=1)
        hint = f"Did you mean {like[0]}?" if like else "Check the spelling."
        return InvalidInputError(f"There is no attribute called {name[:100]}. {hint}")

    def names(self) -> list[str]:
        """List the attributes' names, anew if the folder has changed."""
        try:
            changed = self.store.folder.stat().st_mtime_ns
            if changed != self._listed[0]:
                self._listed = (changed, list(self.store))
        except (ForetraceError, OSError):
            return []
        return self._listed[1]

    def _lookahead(self, key: str, expression: Expression) -> Lookahead:
        """Find a lookahead in memory, on disk, or build it."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                self.observe("hit", 1)
                return self._kept[key]
        self.observe("miss", 1)
        try:
            found = self.shelf.read(key, self.hmm, self.horizon)
        except ForetraceError:
            if self._key(expression) != key:
                raise  # the attributes are others now: what was admitted cannot be built again
            found = self._build(key, expression)
        return self._keep(key, found)

    def _keep(self, key: str, lookahead: Lookahead) -> Lookahead:
        """Keep it in memory, and forget what was not asked for longest if there is too much."""
        with self._lock:
            if key not in self._kept:
                self._kept[key] = lookahead
                self._bytes += lookahead.nbytes
            while self._bytes > self.memory and len(self._kept) > 1:
                self._bytes -= self._kept.popitem(last=False)[1].nbytes
        return lookahead

    def _build_once(self, key: str, expression: Expression, most: int) -> None:
        """Build a table, unless somebody else does so just now: then wait for it."""
        with self._lock:
            turn = self._building.setdefault(key, Lock())
        with turn:
            try:
                if (key, most) in self._refusals:
                    raise InvalidInputError(self._refusals[key, most])
                if not self.shelf.has(key):
                    self._build(key, expression, most)
            except InvalidInputError as error:
                self._remember_refusal(key, most, str(error))
                raise
            finally:
                with self._lock:
                    self._building.pop(key, None)

    def _remember_refusal(self, key: str, most: int, why: str) -> None:
        """Refuse the same again without trying: it may have taken a second to find out."""
        with self._lock:
            self._refusals[key, most] = why
            while len(self._refusals) > MOST_REMEMBERED:
                self._refusals.popitem(last=False)

    def _build(self, key: str, expression: Expression, most: int = MOST_TERMS) -> Lookahead:
        began = perf_counter()
        attributes = {name: self._load(name) for name in expression.names}
        sizes = {name: _Size(len(a.terms)) for name, a in attributes.items()}
        terms = expression.build(sizes, lambda mention: _Size(1, certain=True))
        if terms.count > most:
            raise InvalidInputError(
                f"The goal comes to {terms.count} terms, and {most} is the most here. Use fewer "
                f"attributes in one expression."
            )
        attribute = expression.build(
            attributes, lambda mention: self._spelling().mentions(mention.texts)
        )
        states, count = attribute.terms.states, len(attribute.terms)
        if states > MOST_STATES or states * count > MOST_TABLES:
            raise InvalidInputError(
                f"What must occur or must not comes to an automaton of {states} states, for each "
                f"of {count} terms; {MOST_STATES} states is the most here, and {MOST_TABLES} for "
                f"all terms together. Use fewer or shorter texts, or fewer attributes."
            )
        lookahead = Lookahead(self.hmm, attribute, self.horizon)
        self.shelf.write(key, lookahead)
        self.observe("build", perf_counter() - began)
        return lookahead

    def _spelling(self) -> Spelling:
        """Give what tokens stand for."""
        if self._spelled is None:
            raise InvalidInputError(
                "This server does not know its tokenizer, which it needs for what must occur or "
                "must not. Start it with `foretrace serve`, or set FORETRACE_SERVE_TOKENIZER."
            )
        found = self._spelled()
        if isinstance(found, ForetraceError):
            raise InvalidInputError(f"This server's tokenizer cannot be used: {found}")
        return found

    def _load(self, name: str) -> Attribute:
        try:
            return self.store[name]
        except KeyError:
            raise self._unknown(name) from None
        except InvalidFileError as error:
            logger.error("The attribute '%s' is refused: %s", name, error)
            raise InvalidInputError(
                f"The attribute '{name}' cannot be used: its file is damaged, or of another LM."
            ) from error


def _once(spelled: Callable[[], Spelling]) -> Callable[[], Spelling | ForetraceError]:
    """Give why it failed instead of failing: that is remembered, too."""

    def tried() -> Spelling | ForetraceError:
        try:
            return spelled()
        except ForetraceError as error:
            return error

    return tried


@dataclass(frozen=True)
class _Size:
    """How many terms an expression may have: what attributes are combined into, counted."""

    count: int
    certain: bool = False
    """Whether it is made of what must occur alone: that is one term, whatever the signs."""

    def __and__(self, other: "_Size") -> "_Size":
        return self._joined(self.count * other.count, other)

    def __or__(self, other: "_Size") -> "_Size":
        return self._joined(self.count + other.count + self.count * other.count, other)

    def __invert__(self) -> "_Size":
        return self if self.certain else _Size(self.count + 1)

    def _joined(self, count: int, other: "_Size") -> "_Size":
        certain = self.certain and other.certain
        return _Size(1 if certain else count, certain)
