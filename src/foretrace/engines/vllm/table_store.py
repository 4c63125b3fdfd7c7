"""Lookahead tables and compiled markers, on disk and in the memory of the decoding process.

On disk, every entry is a folder, which appears and disappears as a whole. Build workers, API
servers and the decoding process share the entries. A process that uses an entry holds a lease on
it, and an entry on lease is not evicted.
"""

import errno
import fcntl
import os
import shutil
import stat
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Generic, NamedTuple, Self, TypeVar
from uuid import uuid4

from safetensors import SafetensorError

from foretrace import _io
from foretrace.attribute import Attribute
from foretrace.attribute.automaton import DFA
from foretrace.engines.vllm.params import Admission
from foretrace.errors import ForetraceError, InvalidFileError, InvalidInputError
from foretrace.hmm import HMM
from foretrace.lookahead import Lookahead
from foretrace.lookahead.tables import Tables

T = TypeVar("T")
S = TypeVar("S", "Lookahead", "CompiledMarker")

LOW_WATER = 0.8  # share of the budget that eviction leaves in use
ATTRIBUTE, TABLE, MARKER, SIZE = "attribute", "table", "marker", "size.json"
INCOMPLETE = ".incomplete-"  # begins the names of folders that are not complete, or not any more


class Lease:
    """A shared lock that keeps an entry in the cache until its release.

    The kernel drops the lock when the process ends, so that no lease outlives its holder.
    """

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def release(self) -> None:
        """Release the lock, so that the entry can be evicted. Further calls do nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class GoalSize(NamedTuple):
    """What a table costs, and what its attribute demands of a text."""

    terms: int
    nbytes: int
    """The bytes of the table."""
    min_tokens: int | None
    """Tokens of the shortest text with the attribute; None if it has no automaton."""
    requires_text: bool
    """Whether a text can lack what is required, and get it with more tokens."""
    has_evidence: bool

    @classmethod
    def of(cls, lookahead: Lookahead) -> Self:
        """Return the size of a goal."""
        attribute, vocab_size = lookahead.attribute, lookahead.hmm.vocab_size
        automaton = attribute.terms.automaton
        return cls(
            len(attribute.terms),
            sum(tensor.nbytes for tensor in lookahead.tables),
            None if automaton is None else int(automaton.min_tokens(vocab_size)[0]),
            automaton is not None and automaton.requires_text(vocab_size),
            bool(attribute.evidence),
        )


class CompiledMarker(NamedTuple):
    """The automaton that finds a marker in token ids, and the state in which it was found."""

    dfa: DFA
    found: int
    """-1 if no text of these tokens has the marker."""

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        dfa = self.dfa
        return sum(part.nbytes for part in (dfa.tokens, dfa.classes, dfa.transitions))


class TableStore:
    """A folder of entries by key, shared by the processes of one user."""

    def __init__(self, parent: str | os.PathLike[str], budget: int) -> None:
        """Open the user's private folder below `parent`. `budget` is in bytes."""
        self.folder, self.budget = _private_folder(Path(parent)), budget

    def has(self, key: str) -> bool:
        """Return whether an entry exists."""
        return self._path(key).is_dir()

    def lease(self, key: str) -> Lease | None:
        """Lock an entry against eviction, and mark it as used now; None if it does not exist."""
        descriptor = _lock(self._path(key), fcntl.LOCK_SH)
        if descriptor is None:
            return None
        with suppress(OSError):  # a folder that is read-only evicts nothing
            os.utime(descriptor)
        return Lease(descriptor)

    def size(self, key: str) -> GoalSize:
        """Read the size of a goal, without its table."""
        try:
            return GoalSize(**_io.read_json(self._path(key) / SIZE))
        except TypeError as error:
            raise self._damaged(key) from error

    def attribute(self, key: str) -> Attribute:
        """Load the attribute of a goal, without its table."""
        return Attribute.load(self._path(key) / ATTRIBUTE)

    def lookahead(self, key: str, hmm: HMM, horizon: int) -> Lookahead:
        """Load a lookahead that was built for this HMM."""
        attribute, path = self.attribute(key), self._path(key) / TABLE
        tensors, _ = _io.read_tensors(path)
        shape = (horizon + 1, len(attribute.terms), attribute.terms.num_states)
        # Copy: the file may be evicted while the tensors are used, and small mappings are many.
        values = _io.take_tensor(tensors, "values", (*shape, hmm.num_states), path).clone()
        log_scales = _io.take_tensor(tensors, "log_scales", shape, path).clone()
        if not bool(((values >= 0) & (values <= 1)).all() & log_scales.isfinite().all()):
            raise self._damaged(key)
        return Lookahead(hmm, attribute, horizon, tables=Tables(values, log_scales))

    def add_lookahead(self, key: str, lookahead: Lookahead) -> None:
        """Store a lookahead; evict the least recently used entries that are not leased.

        Raises:
            OSError: The disk is full or read-only, or the entries in use leave no room.
        """
        size = GoalSize.of(lookahead)

        def fill(folder: Path) -> None:
            lookahead.attribute.save(folder / ATTRIBUTE)
            _io.write_tensors(folder / TABLE, lookahead.tables._asdict(), {})
            _io.write_json(folder / SIZE, size._asdict())

        self._add(key, size.nbytes, fill)

    def marker(self, key: str) -> CompiledMarker:
        """Load a compiled marker."""
        path = self._path(key) / MARKER
        tensors, metadata = _io.read_tensors(path)
        try:
            parts = [tensors[name].clone() for name in ("tokens", "classes", "transitions")]
            return CompiledMarker(DFA(*parts), int(metadata["found"]))
        except (KeyError, ValueError) as error:
            raise self._damaged(key) from error

    def add_marker(self, key: str, marker: CompiledMarker) -> None:
        """Store a compiled marker, as `add_lookahead` does."""
        dfa = marker.dfa
        parts = {"tokens": dfa.tokens, "classes": dfa.classes, "transitions": dfa.transitions}

        def fill(folder: Path) -> None:
            _io.write_tensors(folder / MARKER, parts, {"found": str(marker.found)})

        self._add(key, marker.nbytes, fill)

    def remove(self, key: str) -> None:
        """Delete a damaged entry, so that it is built again."""
        _remove(self._path(key))

    def _path(self, key: str) -> Path:
        return self.folder / key

    def _damaged(self, key: str) -> InvalidFileError:
        return InvalidFileError(f"{self._path(key)} is damaged. Delete it: it will be built again.")

    def _add(self, key: str, size: int, fill: Callable[[Path], None]) -> None:
        """Let `fill` write an entry into a new folder, and rename it when it is complete."""
        self._make_room(size)
        scratch = self.folder / f"{INCOMPLETE}{uuid4().hex}"
        scratch.mkdir(mode=0o700)
        lease = Lease(_lock(scratch, fcntl.LOCK_SH))
        try:
            fill(scratch)
            scratch.rename(self._path(key))
        except SafetensorError as error:  # it wraps errors of the file system
            raise OSError(str(error)) from error
        except OSError as error:
            # Another process has built the same entry meanwhile.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        finally:
            lease.release()
            shutil.rmtree(scratch, ignore_errors=True)

    def _make_room(self, size: int) -> None:
        entries = sorted(self._by_age())
        used = sum(entry_size for _, entry_size, _ in entries)
        if used + size <= self.budget:
            return
        for _, entry_size, path in entries:
            if used + size <= LOW_WATER * self.budget:
                return
            if _evict(path):
                used -= entry_size
        if used + size > self.budget:
            raise OSError(
                f"A table of {size >> 20} MB does not fit into the disk cache of "
                f"{self.budget >> 20} MB, because of the tables in use. Start the server with a "
                f"larger --disk."
            )

    def _by_age(self) -> Iterator[tuple[float, int, Path]]:
        """List entries: time of last use, size, path. What a crash left behind is the oldest."""
        for path in self.folder.iterdir():
            with suppress(OSError):
                size = sum(file.stat().st_size for file in path.iterdir())
                yield path.stat().st_mtime, size, path


class ByteLRU(Generic[T]):
    """A cache that drops the least recently used values above its budget in bytes."""

    def __init__(self, budget: int) -> None:
        self._budget, self._used, self._lock = budget, 0, Lock()
        self._entries: OrderedDict[str, tuple[T, int]] = OrderedDict()

    def get(self, key: str) -> T | None:
        """Return the value of a key, and mark it as used now; None if there is none."""
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key][0]

    def add(self, key: str, value: T, size: int) -> None:
        """Keep a value of so many bytes. A value above the budget is kept alone."""
        with self._lock:
            self._used += size - self._entries.pop(key, (value, 0))[1]
            self._entries[key] = (value, size)
            while self._used > self._budget and len(self._entries) > 1:
                self._used -= self._entries.popitem(last=False)[1][1]


class ResidentTables:
    """The tables and markers that the decoding process has loaded, up to a budget in bytes."""

    def __init__(
        self,
        hmm: HMM,
        horizon: int,
        store: TableStore,
        memory: int,
        observe: Callable[[str, float], None] = lambda event, value: None,
    ) -> None:
        """Create it without any table.

        Args:
            hmm: The HMM of the tables.
            horizon: Tokens that every table looks ahead.
            store: The tables on disk.
            memory: The budget.
            observe: Called with "hit" or "miss", and 1.
        """
        self._hmm, self._horizon, self._store, self._observe = hmm, horizon, store, observe
        self._loaded: ByteLRU[Lookahead | CompiledMarker] = ByteLRU(memory)
        self._thread = ThreadPoolExecutor(1, "foretrace-load")

    def prefetch(self, admission: Admission) -> "Future[None]":
        """Load the tables of a request in a thread, beside the forward pass of the LM."""
        return self._thread.submit(self._load_all, admission)

    def _load_all(self, admission: Admission) -> None:
        for key in admission.tables:
            self.lookahead(key)
        for key in admission.markers.values():
            self.marker(key)

    def lookahead(self, key: str) -> Lookahead:
        """Return a lookahead from memory, or load it."""
        found = self._loaded.get(key)
        self._observe("miss" if found is None else "hit", 1)
        if found is None:
            found = self._read(key, lambda: self._store.lookahead(key, self._hmm, self._horizon))
            self._loaded.add(key, found, found.nbytes)
        assert isinstance(found, Lookahead)
        return found

    def marker(self, key: str) -> CompiledMarker:
        """Return a compiled marker from memory, or load it."""
        found = self._loaded.get(key)
        if found is None:
            found = self._read(key, lambda: self._store.marker(key))
            self._loaded.add(key, found, found.nbytes)
        assert isinstance(found, CompiledMarker)
        return found

    def _read(self, key: str, read: Callable[[], S]) -> S:
        try:
            return read()
        except (ForetraceError, RuntimeError):
            self._store.remove(key)  # damaged: the next request has it built again
            raise


def _lock(path: Path, operation: int) -> int | None:
    """Open and lock a folder; return None if it does not exist, or another process locks it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    with suppress(OSError):
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), path.stat()):  # it was not evicted meanwhile
            return descriptor
    os.close(descriptor)
    return None


def _evict(path: Path) -> bool:
    """Delete an entry, unless a process holds a lease on it; return whether it did."""
    descriptor = _lock(path, fcntl.LOCK_EX)
    if descriptor is None:
        return False
    try:
        return _remove(path)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> bool:
    """Rename an entry, so that it disappears as a whole, and delete it."""
    scratch = path.with_name(f"{INCOMPLETE}{uuid4().hex}")
    with suppress(OSError):
        path.rename(scratch)
        shutil.rmtree(scratch, ignore_errors=True)
        return True
    return False


def _private_folder(parent: Path) -> Path:
    """Create a directory that no other user can write to, since its content is trusted."""
    folder = parent / f"foretrace-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise InvalidInputError(
            f"{folder} belongs to another user, or others can write to it. Choose another "
            f"directory for tables."
        )
    return folder
