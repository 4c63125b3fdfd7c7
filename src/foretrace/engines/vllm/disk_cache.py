"""A size-bounded LRU disk cache of attributes and their lookahead tables, in a private directory.

Several processes share it: build workers, API servers and the decoding process. A process that uses
a table holds a lease on it, and a leased table is not evicted.
"""

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from foretrace import _io
from foretrace.attribute import Attribute
from foretrace.errors import InvalidFileError, InvalidInputError
from foretrace.hmm import HMM
from foretrace.lookahead import Lookahead
from foretrace.lookahead.tables import Tables

LOW_WATER = 0.8  # share of the budget that eviction leaves in use


class Lease:
    """A shared file lock that keeps a table in the cache until its release.

    The kernel drops the lock when the process ends, so that no lease outlives its holder.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    def release(self) -> None:
        """Release the lock, so that the table can be evicted. Further calls do nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class DiskCache:
    """A directory of lookaheads by key, shared by the processes of one user."""

    def __init__(self, parent: str | os.PathLike[str], budget: int) -> None:
        """Open the user's private directory below `parent`. `budget` is in bytes."""
        self.folder, self.budget = _private_folder(Path(parent)), budget

    def has(self, key: str) -> bool:
        """Return whether a table is there, and mark it as used now."""
        with suppress(OSError):
            os.utime(self._files(key)[1])
            return True
        return False

    def lease(self, key: str) -> Lease | None:
        """Lock a table against eviction, and mark it as used now; None if it is not there."""
        try:
            descriptor = os.open(self._files(key)[1], os.O_RDONLY)
        except OSError:
            return None
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if os.fstat(descriptor).st_nlink == 0:  # evicted between the two calls above
            os.close(descriptor)
            return None
        os.utime(descriptor)
        return Lease(descriptor)

    def _files(self, key: str) -> tuple[Path, Path]:
        """Return the paths of an attribute and its table. The table is written last."""
        return self.folder / f"{key}.attribute", self.folder / f"{key}.table"

    def attribute(self, key: str) -> Attribute:
        """Load an attribute without its table."""
        return Attribute.load(self._files(key)[0])

    def read(self, key: str, hmm: HMM, horizon: int) -> Lookahead:
        """Load a lookahead that was built for this HMM."""
        attribute, path = self.attribute(key), self._files(key)[1]
        tensors, _ = _io.read_tensors(path)
        shape = (horizon + 1, len(attribute.terms), attribute.terms.num_states)
        # Copy: the file may be evicted while the tensors are used, and small mappings are many.
        values = _io.take_tensor(tensors, "values", (*shape, hmm.num_states), path).clone()
        log_scales = _io.take_tensor(tensors, "log_scales", shape, path).clone()
        if not bool(((values >= 0) & (values <= 1)).all() & log_scales.isfinite().all()):
            raise InvalidFileError(f"{path} is damaged. Delete it: it will be built again.")
        return Lookahead(hmm, attribute, horizon, tables=Tables(values, log_scales))

    def write(self, key: str, lookahead: Lookahead) -> None:
        """Store a lookahead; evict the least recently used tables that are not leased.

        Raises:
            InvalidInputError: The tables in use leave no room for this one.
        """
        self._make_room(sum(tensor.nbytes for tensor in lookahead.tables))
        attribute_path, table_path = self._files(key)
        lookahead.attribute.save(attribute_path)
        _io.write_tensors(table_path, lookahead.tables._asdict(), {})

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
            raise InvalidInputError(
                f"A table of {size >> 20} MB does not fit into the disk cache of "
                f"{self.budget >> 20} MB, because of the tables in use. Try again later, or start "
                f"the server with a larger --disk."
            )

    def _by_age(self) -> Iterator[tuple[float, int, Path]]:
        """List tables: time of last use, size with the attribute's, path."""
        for path in self.folder.glob("*.table"):
            with suppress(OSError):
                status = path.stat()
                size = status.st_size + path.with_suffix(".attribute").stat().st_size
                yield status.st_mtime, size, path


def _evict(path: Path) -> bool:
    """Delete a table and its attribute, unless a process holds a lease; return whether it did."""
    with suppress(OSError), path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
        path.with_suffix(".attribute").unlink(missing_ok=True)
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
