"""Attributes and their tables on disk: whole files, in a folder that is believed, not too many."""

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

FORGET = 0.8  # of the budget is left when it was exceeded


class Shelf:
    """A folder of lookaheads, by key; several processes may use it at once."""

    def __init__(self, parent: Path, budget: int) -> None:
        """Open the user's own folder below this one; `budget` is in bytes."""
        self.folder, self.budget = _own_folder(parent), budget

    def has(self, key: str) -> bool:
        """Look for a table; it is used now, and will not be forgotten first."""
        with suppress(OSError):
            os.utime(self._files(key)[1])
            return True
        return False

    def _files(self, key: str) -> tuple[Path, Path]:
        """Give where an attribute and its table are; the table comes last, when all is whole."""
        return self.folder / f"{key}.attribute", self.folder / f"{key}.table"

    def attribute(self, key: str) -> Attribute:
        """Read an attribute alone."""
        return Attribute.load(self._files(key)[0])

    def read(self, key: str, hmm: HMM, horizon: int) -> Lookahead:
        """Read a lookahead of this HMM."""
        attribute, file = self.attribute(key), self._files(key)[1]
        tensors, _ = _io.read_tensors(file)
        shape = (horizon + 1, len(attribute.terms), attribute.terms.states)
        # Copies: the file may be forgotten while it is used, and small maps are many.
        values = _io.take_tensor(tensors, "values", (*shape, hmm.num_states), file).clone()
        log_scales = _io.take_tensor(tensors, "log_scales", shape, file).clone()
        if not bool(((values >= 0) & (values <= 1)).all() & (log_scales <= 0).all()):
            raise InvalidFileError(f"{file} is damaged. Remove it: it will be built again.")
        return Lookahead(hmm, attribute, horizon, tables=Tables(values, log_scales))

    def write(self, key: str, lookahead: Lookahead) -> None:
        """Write a lookahead, and forget others if there is too much."""
        attribute_file, table_file = self._files(key)
        lookahead.attribute.save(attribute_file)
        _io.write_tensors(table_file, lookahead.tables._asdict(), {})
        self._forget()

    def _forget(self) -> None:
        """Remove the tables that were not used longest, if the folder has grown too large."""
        found = sorted(self._by_age())
        size = sum(own for _, own, _ in found)
        if size <= self.budget:
            return
        for _, own, path in found:
            if size <= FORGET * self.budget:
                break
            for each in (path, path.with_suffix(".attribute")):
                with suppress(OSError):
                    each.unlink()
            size -= own

    def _by_age(self) -> Iterator[tuple[float, int, Path]]:
        """List tables: when each was used last, and its size with that of its attribute."""
        for path in self.folder.glob("*.table"):
            with suppress(OSError):
                facts = path.stat()
                own = facts.st_size + path.with_suffix(".attribute").stat().st_size
                yield facts.st_mtime, own, path


def _own_folder(parent: Path) -> Path:
    """Give a folder that nobody else can write to: what lies in it is believed."""
    folder = parent / f"foretrace-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o022:
        raise InvalidInputError(
            f"{folder} belongs to somebody else, or others can write to it. Give another folder "
            f"for tables."
        )
    return folder
