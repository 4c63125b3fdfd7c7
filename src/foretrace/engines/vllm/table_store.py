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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp
from threading import Lock
from typing import Generic, NamedTuple, Self, TypeVar
from uuid import uuid4

from safetensors import SafetensorError

from foretrace import _io
from foretrace.attribute import Attribute
from foretrace.attribute.automaton import DFA
from foretrace.errors import ForetraceError, InvalidFileError, InvalidInputError
from foretrace.hmm import HMM
from foretrace.lookahead import Lookahead
from foretrace.lookahead.tables import Tables
from foretrace.steering import Marker
from foretrace.steering.markers import CompiledMarker

T = TypeVar("T")

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
    """Whether there are rewards, of words or of context."""
    rank: int = 0
    """The number of components of the context reward."""

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
            attribute.has_rewards,
            0 if attribute.context is None else len(attribute.context),
        )


class TableStore:
    """A folder of entries by key, shared by the processes of one user."""

    def __init__(self, parent: str | os.PathLike[str], budget: int) -> None:
        """Open the user's private folder below `parent`. `budget` is in bytes."""
        self.folder, self.budget = private_folder(Path(parent)), budget

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
        logs = [
            _io.take_tensor(tensors, name, shape, path).clone()
            for name in ("log_scales", "log_missing")
        ]
        is_valid = ((values >= 0) & (values <= 1)).all()
        if not all(map(bool, (is_valid, *(one.isfinite().all() for one in logs)))):
            raise self._damaged(key)
        return Lookahead(hmm, attribute, horizon, tables=Tables(values, *logs))

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

    def marker(self, key: str, marker: Marker) -> CompiledMarker:
        """Load the automaton of a marker."""
        path = self._path(key) / MARKER
        tensors, metadata = _io.read_tensors(path)
        try:
            parts = [tensors[name].clone() for name in ("tokens", "classes", "transitions")]
            return CompiledMarker(marker, DFA(*parts), int(metadata["found"]))
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
            if _evict(path) or not path.exists():  # another process may have evicted it
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


class TableLoader:
    """Loads the tables and markers of requests in a thread, beside the forward pass of the LM."""

    def __init__(self, store: TableStore, hmm: HMM, horizon: int) -> None:
        """Create it; `horizon` is the number of tokens that every table looks ahead."""
        self._store, self._hmm, self._horizon = store, hmm, horizon
        self._thread = ThreadPoolExecutor(1, "foretrace-load")

    def prefetch(
        self, tables: Sequence[str], markers: Mapping[str, Marker]
    ) -> "Future[dict[str, Lookahead | CompiledMarker]]":
        """Begin to load tables, and the automata of markers, by their keys."""
        return self._thread.submit(self._load, tables, markers)

    def _load(
        self, tables: Sequence[str], markers: Mapping[str, Marker]
    ) -> dict[str, Lookahead | CompiledMarker]:
        loaded: dict[str, Lookahead | CompiledMarker] = {}
        for key in (*tables, *markers):
            try:
                if key in markers:
                    loaded[key] = self._store.marker(key, markers[key])
                else:
                    loaded[key] = self._store.lookahead(key, self._hmm, self._horizon)
            except (ForetraceError, RuntimeError):
                self._store.remove(key)  # damaged: the next request has it built again
                raise
        return loaded


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


def private_folder(parent: Path, name: str = "foretrace") -> Path:
    """Create a directory that no other user can write to, since its content is trusted."""
    folder = parent / f"{name}-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise InvalidInputError(
            f"{folder} belongs to another user, or others can write to it. Choose another "
            f"directory for tables: --tables."
        )
    return folder


def process_folder(parent: Path, name: str) -> Path:
    """Create a folder for this process and what it executes; delete those of ended processes.

    A lock says that the process runs. Its descriptor stays open until the process ends.
    """
    parent = private_folder(parent, name)
    turn = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(turn, fcntl.LOCK_EX)  # no other process deletes a folder before it is locked
        for other in parent.iterdir():
            _evict(other)
        folder = Path(mkdtemp(dir=parent))
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        os.set_inheritable(descriptor, True)
    finally:
        os.close(turn)
    return folder
