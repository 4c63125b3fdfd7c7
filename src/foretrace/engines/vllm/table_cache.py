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
from difflib import get_close_matches
from functools import cache, lru_cache
from threading import Lock
from time import perf_counter

from foretrace.attribute import Attribute, AttributeStore
from foretrace.attribute.expression import Contains
from foretrace.engines.token_bytes import TokenBytes
from foretrace.engines.vllm.disk_cache import DiskCache, Lease
from foretrace.engines.vllm.goal_size import GoalSize, check_sizes, require_small
from foretrace.engines.vllm.params import GoalParams, SteeringParams
from foretrace.errors import (
    ForetraceError,
    InvalidFileError,
    InvalidInputError,
    TokenizerMismatchError,
)
from foretrace.hmm import HMM
from foretrace.lookahead import Lookahead
from foretrace.steering import Goal, Marker
from foretrace.steering.conjunction import conjunction

logger = logging.getLogger(__name__)

VERSION = 3  # of the tables: others are not read
MAX_REMEMBERED = 4_096  # entries of the small caches below
MAX_ATTRIBUTES = 256  # in memory of the process that builds: a level's strength is found once
MAX_MARKERS = 64  # in memory
MAX_COMPARED = 500  # names, when a name is misspelt


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
        self._marker = lru_cache(MAX_MARKERS)(self._make_marker)
        self._size = lru_cache(MAX_REMEMBERED)(self._read_size)
        self._attribute = lru_cache(MAX_ATTRIBUTES)(self._read_attribute)
        self._identity = [VERSION, hmm.checksum, hmm.config.eos_token_ids, horizon]
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
        return [self._key(goal) for goal in params.goals]

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
            require_small(params.goals, self._load)
        for i in missing:
            self._build_once(keys[i], params.goals[i])
        check_sizes(params, [self._size(key) for key in keys], limit)
        for text in params.markers:
            self._marker(text)
        return keys

    def has_constraint(self, keys: Sequence[str]) -> bool:
        """Return whether a goal of an admitted request has required or forbidden texts."""
        return any(self._size(key).min_tokens is not None for key in keys)

    def _read_size(self, key: str) -> GoalSize:
        return GoalSize.from_attribute(self.disk.attribute(key), self.hmm.vocab_size)

    def goals(
        self, params: SteeringParams, keys: list[str], *, build: bool = True
    ) -> tuple[Goal, ...]:
        """Load the goals of an admitted request.

        Args:
            params: The request's goals.
            keys: The keys that `admit` returned for the request.
            build: Whether to build a table that was evicted meanwhile, or to raise.
        """
        after = None if params.after is None else self._marker(params.after)
        window = params.window
        return tuple(
            Goal(
                self._lookahead(key, goal, build),
                strength=1.0,  # the strengths are inside the lookahead
                transform=goal.transform,
                neutral_end=params.neutral_end,
                after=after,
                window=self._marker(window) if isinstance(window, str) else window,
            )
            for key, goal in zip(keys, params.goals, strict=True)
        )

    def _key(self, goal: GoalParams) -> str:
        """Return a hash of what a table depends on.

        That is the HMM, the horizon, the operands with their strength or level, the attribute files
        and the tokenizer. The transform is not part of it: it is applied to the table's result.
        """
        operands = [
            [[*map(str, operand.expression.steps)], operand.strength or operand.level]
            for operand in goal.operands
        ]
        files = [(name, *self._file(name)) for name in goal.names]
        tokens = self._token_bytes().identity if goal.contains else None
        content = json.dumps([self._identity, operands, files, tokens])
        return hashlib.sha256(content.encode()).hexdigest()

    def _file(self, name: str) -> tuple[int, int, int]:
        """Return the identity of an attribute's file, which changes when it is replaced."""
        try:
            status = self.store.path(name).stat()
        except (OSError, ValueError):
            raise self._unknown(name) from None
        return status.st_mtime_ns, status.st_size, status.st_ino

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

    def _lookahead(self, key: str, goal: GoalParams, build: bool) -> Lookahead:
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
            if not build or self._key(goal) != key:
                raise
            lookahead = self._build(key, goal)
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

    def _build_once(self, key: str, goal: GoalParams) -> None:
        """Build a table, or wait for the thread that is building it."""
        with self._lock:
            turn = self._building.setdefault(key, Lock())
        with turn:
            try:
                if not self.disk.has(key):
                    self._build(key, goal)
            finally:
                with self._lock:
                    self._building.pop(key, None)

    def _build(self, key: str, goal: GoalParams) -> Lookahead:
        """Build the table of a goal; find strengths that were not calibrated with the HMM."""
        began = perf_counter()
        attributes = {name: self._load(name) for name in goal.names}
        attribute = conjunction(goal.operands, attributes, self._contains, self.hmm)
        lookahead = Lookahead(self.hmm, attribute, self.horizon)
        self.disk.write(key, lookahead)
        self.observe("build", perf_counter() - began)
        return lookahead

    def _contains(self, operand: Contains) -> Attribute:
        return self._token_bytes().contains(operand.texts)

    def _make_marker(self, text: str) -> Marker:
        return self._token_bytes().marker(text)

    def _token_bytes(self) -> TokenBytes:
        """Return the bytes of each token; the first call loads the tokenizer."""
        if self._load_token_bytes is None:
            raise InvalidInputError(
                "Required and forbidden texts and markers need the tokenizer, which this server "
                "does not know. Start it with `foretrace serve`, or set FORETRACE_SERVE_TOKENIZER."
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
        """Load an attribute, or return the one that was loaded from the same file before."""
        return self._attribute(name, self._file(name))

    def _read_attribute(self, name: str, file: tuple[int, int, int]) -> Attribute:
        try:
            return self.store[name]
        except KeyError:
            raise self._unknown(name) from None
        except (InvalidFileError, TokenizerMismatchError) as error:
            logger.error(
                "The attribute '%s' is refused: %s", name, error, extra={"attribute": name}
            )
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
