"""Who is doing which piece of work: claims that outlive no worker.

Work is named by the file that it makes. A claim is a small file beside it that its worker touches
while it lives; one that is no longer touched, or whose process on this machine is gone, is taken
over. The file system must know hard links.
"""

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from uuid import uuid4

from foretrace import _io
from foretrace.errors import InvalidFileError

BEAT_SECONDS = 10.0  # how often a worker says that it is alive
STALE_SECONDS = 60.0  # how long others believe it
LOOK_SECONDS = 1.0  # how often to look whether others are done, or gone


def share(
    paths: Sequence[Path],
    work: Callable[[int, Path], None],
    *,
    until: Callable[[], bool] = lambda: False,
) -> None:
    """Do the work that makes each path, beside any number of workers who do the same.

    `work` is called with what nobody else has done or is at. Returns when all paths are there, or
    `until` says that they are no longer needed: what others are at is waited for, and taken over if
    they die.
    """
    while not until() and (waiting := [n for n, path in enumerate(paths) if not path.exists()]):
        idle = True
        for number in waiting:
            with claimed(paths[number]) as mine:
                if mine and not until():
                    work(number, paths[number])
                    idle = False
        if idle:
            time.sleep(LOOK_SECONDS)
    for path in paths:  # someone may have died between finishing and saying so
        _tidy(path)


@contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Claim the work that will become `path`; False if it is done, or another worker is at it."""
    claim = _claim(path)
    name = None if path.exists() else _take(claim)
    if name is None:
        yield False
        return
    done = Event()
    beat = Thread(target=_keep_alive, args=(claim, name, done), daemon=True)
    beat.start()
    try:
        yield not path.exists()  # it may have been finished just before the claim was free
    finally:
        done.set()
        beat.join()
        if _name(claim) == name:
            claim.unlink(missing_ok=True)


def _claim(path: Path) -> Path:
    return path.with_name(f".{path.name}.claim")


def _take(claim: Path) -> str | None:
    """Claim, under a name that nobody else has: give it, or None if another worker holds it."""
    name = uuid4().hex
    owner = {"name": name, "host": _host(), "process": os.getpid()}
    for _ in range(2):
        try:
            with _io.atomic_write(claim, replace=False) as scratch:
                scratch.write_text(_io.to_json(claim, owner), "utf-8")
                now = scratch.stat().st_mtime  # by the clock of whoever keeps the files
            return name
        except FileExistsError:
            if not _remove_if_abandoned(claim, now):
                return None
    return None


def _remove_if_abandoned(claim: Path, now: float) -> bool:
    """Remove a claim whose worker is gone, and what it had half written; whether it is free."""
    try:
        age = now - claim.stat().st_mtime
        owner = _io.read_json(claim)
    except (FileNotFoundError, InvalidFileError):
        return True  # given up in this very moment
    gone = owner.get("host") == _host() and not _alive(int(owner.get("process", 0)))
    if not gone and age <= STALE_SECONDS:
        return False
    # Others may do the same right now: whoever renames it has it, if it is still the dead one's.
    aside = claim.with_name(f"{claim.name}.{uuid4().hex}")
    try:
        claim.rename(aside)
    except FileNotFoundError:
        return True
    if _name(aside) != owner.get("name"):
        with suppress(FileExistsError):
            claim.hardlink_to(aside)
        aside.unlink()
        return False
    aside.unlink()
    for scrap in claim.parent.glob(f"{claim.name.removesuffix('.claim')}.*.partial"):
        scrap.unlink(missing_ok=True)
    return True


def _tidy(path: Path) -> None:
    claim = _claim(path)
    if claim.exists():
        _remove_if_abandoned(claim, time.time())


def _name(claim: Path) -> str | None:
    try:
        name: str | None = _io.read_json(claim).get("name")
    except (FileNotFoundError, InvalidFileError):
        return None
    return name


def _host() -> str:
    """Name the machine, and the processes that can be seen from here."""
    parts = [socket.gethostname()]
    with suppress(OSError):  # where there is /proc: this boot, this container
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip())
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    return " ".join(parts)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _keep_alive(claim: Path, name: str, done: Event) -> None:
    while not done.wait(BEAT_SECONDS):
        with suppress(OSError):  # a file system may be away for a moment
            if _name(claim) == name:
                os.utime(claim)
