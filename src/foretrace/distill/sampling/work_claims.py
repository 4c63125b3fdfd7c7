"""Distribute work over processes by claim files, without a coordinator.

A piece of work is identified by the file that it produces. A worker claims it with a small claim
file in the same folder, which the worker touches regularly. Another worker takes over a claim that
has not been touched for a while, or whose process, on the same machine, no longer exists. The
file system must support hard links.
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
from foretrace._hardware import share_cores
from foretrace.errors import InvalidFileError

HEARTBEAT_SECONDS = 10.0  # how often a worker touches its claim
STALE_SECONDS = 60.0  # age at which others take a claim over
POLL_SECONDS = 1.0  # how often to check whether other workers have finished or died


def share_work(
    paths: Sequence[Path],
    work: Callable[[int, Path], None],
    *,
    until: Callable[[], bool] = lambda: False,
) -> None:
    """Produce all paths, together with any number of workers that call the same function.

    `work` is called with the number and the path of each file that no other worker has produced or
    claimed. Workers on the same machine divide its cores among them. The function returns when all
    paths exist, or when `until` returns True. It waits for files that others have claimed, and
    takes their claims over if they die.
    """
    while not until() and (missing := [n for n, path in enumerate(paths) if not path.exists()]):
        idle = True
        for number in missing:
            with claim_work(paths[number]) as claimed:
                if claimed and not until():
                    with share_cores(_count_local_workers(paths[number].parent)):
                        work(number, paths[number])
                    idle = False
        if idle:
            time.sleep(POLL_SECONDS)
    for path in paths:  # a worker may have died between finishing and releasing its claim
        _remove_abandoned_claim(path)


@contextmanager
def claim_work(path: Path) -> Iterator[bool]:
    """Claim the work that produces `path`; yield False if it exists or is claimed by another."""
    claim = _claim_path(path)
    claim_id = None if path.exists() else _acquire(claim)
    if claim_id is None:
        yield False
        return
    released = Event()
    heartbeat = Thread(target=_keep_alive, args=(claim, claim_id, released), daemon=True)
    heartbeat.start()
    try:
        yield not path.exists()  # another worker may have finished just before it was claimed
    finally:
        released.set()
        heartbeat.join()
        if _read_id(claim) == claim_id:
            claim.unlink(missing_ok=True)


def _count_local_workers(folder: Path) -> int:
    """Count the processes on this machine that hold claims in a folder, this one included."""
    host, processes = _host(), {os.getpid()}
    for claim in folder.glob(".*.claim"):
        with suppress(FileNotFoundError, InvalidFileError):  # released at this moment
            owner = _io.read_json(claim)
            if owner.get("host") == host and _process_exists(int(owner["process"])):
                processes.add(int(owner["process"]))
    return len(processes)


def _claim_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.claim")


def _acquire(claim: Path) -> str | None:
    """Write a claim file with a unique id; return the id, or None if another worker holds it."""
    claim_id = uuid4().hex
    owner = {"name": claim_id, "host": _host(), "process": os.getpid()}
    for _ in range(2):
        try:
            with _io.atomic_write(claim, replace=False) as scratch:
                scratch.write_text(_io.to_json(claim, owner), "utf-8")
                now = scratch.stat().st_mtime  # by the clock of the file server
            return claim_id
        except FileExistsError:
            if not _remove_if_abandoned(claim, now):
                return None
    return None


def _remove_if_abandoned(claim: Path, now: float) -> bool:
    """Remove the claim and the partial files of a dead worker; return whether the claim is free."""
    try:
        age = now - claim.stat().st_mtime
        owner = _io.read_json(claim)
    except (FileNotFoundError, InvalidFileError):
        return True  # released at this moment
    dead = owner.get("host") == _host() and not _process_exists(int(owner.get("process", 0)))
    if not dead and age <= STALE_SECONDS:
        return False
    # Several workers may get here at once, but only one can rename the claim. It then checks that
    # the renamed file is the dead worker's claim: another worker may have written a new one.
    aside = claim.with_name(f"{claim.name}.{uuid4().hex}")
    try:
        claim.rename(aside)
    except FileNotFoundError:
        return True
    if _read_id(aside) != owner.get("name"):
        with suppress(FileExistsError):
            claim.hardlink_to(aside)
        aside.unlink()
        return False
    aside.unlink()
    for partial in claim.parent.glob(f"{claim.name.removesuffix('.claim')}.*.partial"):
        partial.unlink(missing_ok=True)
    return True


def _remove_abandoned_claim(path: Path) -> None:
    claim = _claim_path(path)
    if claim.exists():
        _remove_if_abandoned(claim, time.time())


def _read_id(claim: Path) -> str | None:
    try:
        claim_id: str | None = _io.read_json(claim).get("name")
    except (FileNotFoundError, InvalidFileError):
        return None
    return claim_id


def _host() -> str:
    """Identify the machine, its boot, and the namespace of its process ids."""
    names = [socket.gethostname()]
    with suppress(OSError):  # not Linux
        names.append(Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip())
        names.append(str(Path("/proc/self/ns/pid").readlink()))
    return " ".join(names)


def _process_exists(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _keep_alive(claim: Path, claim_id: str, released: Event) -> None:
    while not released.wait(HEARTBEAT_SECONDS):
        with suppress(OSError):  # a network file system may be unavailable for a moment
            if _read_id(claim) == claim_id:
                os.utime(claim)
