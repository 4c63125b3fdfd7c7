"""Who is working on which shard: claims that outlive no worker."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

from foretrace import _io
from foretrace.errors import InvalidFileError

BEAT_SECONDS = 10.0  # how often a worker says that it is alive
STALE_SECONDS = 60.0  # how long others believe it


@contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Claim the work that will become `path`; False if it is done, or another worker is at it.

    A claim is a file beside `path` that its worker touches while it lives. One that is no longer
    touched, or whose process on this machine is gone, is taken over.
    """
    claim = path.with_name(f".{path.name}.claim")
    if path.exists() or not _take(claim):
        yield False
        return
    done = Event()
    beat = Thread(target=_keep_alive, args=(claim, done), daemon=True)
    beat.start()
    try:
        yield not path.exists()  # it may have been finished just before the claim was free
    finally:
        done.set()
        beat.join()
        claim.unlink(missing_ok=True)


def _take(claim: Path) -> bool:
    owner = {"host": socket.gethostname(), "process": os.getpid()}
    for _ in range(2):
        try:
            with _io.written_aside(claim, replace=False) as scratch:
                scratch.write_text(_io.to_json(claim, owner), "utf-8")
            return True
        except FileExistsError:
            if not _abandoned(claim):
                return False
            claim.unlink(missing_ok=True)
    return False


def _abandoned(claim: Path) -> bool:
    try:
        age = time.time() - claim.stat().st_mtime
        owner = _io.read_json(claim)
    except (FileNotFoundError, InvalidFileError):
        return True  # given up in this very moment
    here = owner.get("host") == socket.gethostname()
    return age > STALE_SECONDS or (here and not _alive(int(owner.get("process", 0))))


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _keep_alive(claim: Path, done: Event) -> None:
    while not done.wait(BEAT_SECONDS):
        if claim.exists():
            os.utime(claim)
