"""Lookahead tables of the attributes in a folder: built once, cached on disk and in memory.

The build worker builds the tables of a request before the request is admitted, and the decoding
process loads them. Replacing an attribute file does not affect requests that are already admitted.
"""

import hashlib
import json
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import cache, lru_cache
from threading import Lock
from time import perf_counter
from typing import NamedTuple

import torch

from foretrace.attribute import Attribute, AttributeStore, Expression
from foretrace.engines.token_bytes import TokenBytes
from foretrace.engines.vllm.disk_cache import DiskCache, Lease
from foretrace.engines.vllm.params import SteeringParams
from foretrace.errors import ForetraceError, InvalidFileError, InvalidInputError
from foretrace.hmm import HMM
from foretrace.lookahead import Lookahead
from foretrace.steering import Goal
from foretrace.steering.request import require_single_constraint

logger = logging.getLogger(__name__)

VERSION = 2  # of the tables: others are not read
MAX_TERMS = 16  # of all goals of a request: each costs a table, and its share of every step
MAX_STATES, MAX_TABLES = 64, 256  # of a goal's automaton, and of that times the goal's terms
MAX_REMEMBERED = 4_096  # entries of the small caches below
MAX_COMPARED = 500  # names, when a name is misspelt


class GoalSize(NamedTuple):
    """The cost of a goal, computed without its tables."""

    terms: int
    min_tokens: int | None
    """Tokens that the shortest text with the attribute has; None if no text is required."""


class TableCache:
    """An HMM, a folder of attributes, and a disk cache of tables; used by many threads."""

    def __init__(
        self,
        hmm: HMM,
        attributes: str | os.PathLike[str],
        tables: str | os.PathLike[str],
        *,
        horizon: int = 64,
        memory: int = 1 << 30,
        disk: int = 8 << 30,
        load_token_bytes: Callable[[], TokenBytes] | None = None,
        observe: Callable[[str, float], None] = lambda event, value: None,
    ) -> None:
        """Open the folders.

        Args:
            hmm: The HMM that tables are built for.
            attributes: Folder of attribute files.
            tables: Parent folder of the disk cache.
            horizon: Tokens that every table looks ahead.
            memory: Budget in bytes for tables in memory.
            disk: Budget in bytes for tables on disk.
            load_token_bytes: Loads the bytes of each token, for goals that name texts.
            observe: Called with "hit", "miss" or "build" and a number.
        """
        self.hmm, self.horizon = hmm, horizon
        self.store = AttributeStore(
            attributes, tokenizer_fingerprint=hmm.config.tokenizer_fingerprint
        )
        self.memory, self.observe = memory, observe
        self.disk = DiskCache(tables, disk)
        self.read_only = False
        """Whether another process builds tables. If so, `admit` refuses goals without a table."""
        self._load_token_bytes = (
            None if load_token_bytes is None else cache(_once(load_token_bytes))
        )
        self._size = lru_cache(MAX_REMEMBERED)(self._read_size)
        self._identity = [VERSION, hmm.identity(), hmm.config.eos_token_ids, horizon]
        self._kept: OrderedDict[str, Lookahead] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()
        self._building: dict[str, Lock] = {}
        self._listed: tuple[int, list[str]] = (0, [])

    def keys(self, params: SteeringParams) -> list[str]:
        """Return the key of each goal's table, without building any.

        Raises:
            InvalidInputError: An attribute is unknown, or the horizon is larger than the server's.
        """
        if params.horizon is not None and params.horizon > self.horizon:
            raise InvalidInputError(
                f"The horizon of this server is at most {self.horizon} tokens, not "
                f"{params.horizon}."
            )
        return [self._key(goal.expression.normalized()) for goal in params.goals]

    def lease(self, params: SteeringParams) -> list[Lease] | None:
        """Lease the tables of a request; return None if one does not exist."""
        leases: list[Lease] = []
        for key in self.keys(params):
            lease = self.disk.lease(key)
            if lease is None:
                for other in leases:
                    other.release()
                return None
            leases.append(lease)
        return leases

    def admit(self, params: SteeringParams, limit: int | None = None) -> list[str]:
        """Check a request, build or find its tables, and return their keys.

        Args:
            params: The request's goals.
            limit: The maximum number of tokens of the text.

        Raises:
            InvalidInputError: The request is not valid, costs too much, or (where the cache is
                read-only) needs a table that was not built.
        """
        keys = self.keys(params)
        missing = [i for i, key in enumerate(keys) if not self.disk.has(key)]
        if missing and self.read_only:
            raise InvalidInputError(
                "The tables of this goal are not built. The server builds tables for JSON requests "
                "to /v1/ only: send the goal there first."
            )
        if missing:
            self._require_small([goal.expression for goal in params.goals])
        for i in missing:
            self._build_once(keys[i], params.goals[i].expression)
        self._check_sizes([self._size(key) for key in keys], limit)
        return keys

    def has_constraint(self, keys: Sequence[str]) -> bool:
        """Return whether a goal of an admitted request has required or forbidden texts."""
        return any(self._size(key).min_tokens is not None for key in keys)

    def _check_sizes(self, sizes: Sequence[GoalSize], limit: int | None) -> None:
        """Raise if the goals of a request have too many terms, or too few tokens to be met."""
        _require_few_terms(sum(size.terms for size in sizes))
        required = [size.min_tokens for size in sizes if size.min_tokens is not None]
        require_single_constraint(len(required))
        if limit is not None and required and required[0] > limit:
            raise InvalidInputError(
                f"The required texts take {required[0]} tokens at least, but the text may have "
                f"{limit}. Raise max_tokens."
            )

    def _read_size(self, key: str) -> GoalSize:
        terms = self.disk.attribute(key).terms
        if terms.automaton is None:
            return GoalSize(len(terms), None)
        return GoalSize(len(terms), int(terms.automaton.min_tokens(self.hmm.vocab_size)[0]))

    def goals(
        self, params: SteeringParams, keys: list[str], *, build: bool = True
    ) -> tuple[Goal, ...]:
        """Load the goals of an admitted request.

        Args:
            params: The request's goals.
            keys: The keys that `admit` returned for the request.
            build: Whether to build a table that was evicted meanwhile, or to raise.
        """
        return tuple(
            Goal(
                self._lookahead(key, goal.expression, build),
                goal.strength,
                goal.shift,
                params.neutral_end,
            )
            for key, goal in zip(keys, params.goals, strict=True)
        )

    def _key(self, expression: Expression) -> str:
        """Return a hash of what a table depends on: HMM, expression, attribute files, tokenizer."""
        files = []
        for name in expression.names:
            try:
                status = self.store.path(name).stat()
            except (OSError, ValueError):
                raise self._unknown(name) from None
            files.append((name, status.st_mtime_ns, status.st_size, status.st_ino))
        tokens = self._token_bytes().identity if expression.mentions else None
        content = json.dumps([self._identity, [*map(str, expression.steps)], files, tokens])
        return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()

    def _unknown(self, name: str) -> InvalidInputError:
        names = [known for known in self.names() if abs(len(known) - len(name)) <= 3]
        like = get_close_matches(name[:100], names[:MAX_COMPARED], n=1)
        hint = f"Did you mean {like[0]}?" if like else "Check the spelling."
        return InvalidInputError(f"There is no attribute called {name[:100]}. {hint}")

    def names(self) -> list[str]:
        """List the attributes' names; read the folder again if it has changed."""
        try:
            changed = self.store.folder.stat().st_mtime_ns
            if changed != self._listed[0]:
                self._listed = (changed, list(self.store))
        except (ForetraceError, OSError):
            return []
        return self._listed[1]

    def _lookahead(self, key: str, expression: Expression, build: bool) -> Lookahead:
        """Find a lookahead in memory or on disk, or build it."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                self.observe("hit", 1)
                return self._kept[key]
        self.observe("miss", 1)
        try:
            lookahead = self.disk.read(key, self.hmm, self.horizon)
        except ForetraceError:
            # A request keeps the attributes it was admitted with: others are not built for it.
            if not build or self._key(expression.normalized()) != key:
                raise
            lookahead = self._build(key, expression)
        return self._keep(key, lookahead)

    def _keep(self, key: str, lookahead: Lookahead) -> Lookahead:
        """Keep a lookahead in memory; drop the least recently used ones over the budget."""
        with self._lock:
            if key not in self._kept:
                self._kept[key] = lookahead
                self._bytes += lookahead.nbytes
            while self._bytes > self.memory and len(self._kept) > 1:
                self._bytes -= self._kept.popitem(last=False)[1].nbytes
        return lookahead

    def _build_once(self, key: str, expression: Expression) -> None:
        """Build a table, or wait for the thread that is building it."""
        with self._lock:
            turn = self._building.setdefault(key, Lock())
        with turn:
            try:
                if not self.disk.has(key):
                    self._build(key, expression)
            finally:
                with self._lock:
                    self._building.pop(key, None)

    def _require_small(self, expressions: Sequence[Expression]) -> None:
        """Raise if goals would cost too much, before anything of their size is computed.

        The goals are built over an alphabet of bytes instead of the vocabulary. An automaton over
        tokens has no more states than the one over bytes, and the terms are the same.
        """
        terms = 0
        for expression in expressions:
            attributes = {
                name: _over_bytes(i, self._load(name)) for i, name in enumerate(expression.names)
            }
            small = expression.build(
                attributes, lambda mention: Attribute.occurrence(mention.texts, BYTES)
            ).terms
            states = small.num_states
            if states > MAX_STATES or states * len(small) > MAX_TABLES:
                raise InvalidInputError(
                    f"The required and forbidden texts need an automaton of {states} states "
                    f"for each of {len(small)} terms. At most {MAX_STATES} states are allowed, and "
                    f"{MAX_TABLES} for all terms together. Use fewer or shorter texts, or fewer "
                    f"attributes."
                )
            terms += len(small)
        _require_few_terms(terms)

    def _build(self, key: str, expression: Expression) -> Lookahead:
        began = perf_counter()
        attributes = {name: self._load(name) for name in expression.names}
        attribute = expression.build(
            attributes, lambda mention: self._token_bytes().mentions(mention.texts)
        )
        lookahead = Lookahead(self.hmm, attribute, self.horizon)
        self.disk.write(key, lookahead)
        self.observe("build", perf_counter() - began)
        return lookahead

    def _token_bytes(self) -> TokenBytes:
        """Return the bytes of each token; the first call loads the tokenizer."""
        if self._load_token_bytes is None:
            raise InvalidInputError(
                "Required and forbidden texts need the tokenizer, which this server does not know. "
                "Start it with `foretrace serve`, or set FORETRACE_SERVE_TOKENIZER."
            )
        loaded = self._load_token_bytes()
        if isinstance(loaded, Exception):
            why = loaded if isinstance(loaded, ForetraceError) else "its log says why."
            raise InvalidInputError(f"This server's tokenizer cannot be used: {why}")
        return loaded

    def load_tokenizer(self) -> None:
        """Load the tokenizer now, so that no request waits for it."""
        if self._load_token_bytes is not None:
            self._load_token_bytes()

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


def _once(load_token_bytes: Callable[[], TokenBytes]) -> Callable[[], TokenBytes | Exception]:
    """Return a function that returns an error instead of raising it, so that it can be cached."""

    def tried() -> TokenBytes | Exception:
        try:
            return load_token_bytes()
        except Exception as error:  # a tokenizer's files or code may raise anything
            logger.exception("The server's tokenizer cannot be used")
            return error

    return tried


BYTES = [bytes([value]) for value in range(256)]
"""A vocabulary of single bytes."""


def _over_bytes(index: int, attribute: Attribute) -> Attribute:
    """Return an attribute over bytes whose terms combine as another's do.

    Its one token has a random integer as log-weight in each term: sums of these are exact, and
    equal only where the same terms were multiplied. A constant term stays constant.
    """
    terms = attribute.terms
    generator = torch.Generator().manual_seed(index)
    random = torch.randint(1, 1 << 40, (len(terms), 1), generator=generator).double()
    constant = (terms.log_weights == 0).all(1, keepdim=True)
    token = torch.tensor([index], dtype=torch.int32)
    return Attribute(replace(terms, tokens=token, log_weights=torch.where(constant, 0.0, -random)))


def _require_few_terms(count: int) -> None:
    if count > MAX_TERMS:
        raise InvalidInputError(
            f"The goals of this request have {count} terms, but {MAX_TERMS} are allowed. Use fewer "
            f"attributes."
        )
