"""Claims: one worker at a time, and none that a dead worker holds."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from foretrace.distill.sampling import work_claims
from foretrace.distill.sampling.work_claims import claimed, share


def claim_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.claim")


def test_one_worker_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "work"
    with claimed(path) as mine, claimed(path) as other:
        assert mine
        assert not other
        assert claim_of(path).exists()
    assert not claim_of(path).exists()
    with claimed(path) as again:
        assert again


def test_what_is_done_is_not_claimed(tmp_path: Path) -> None:
    path = tmp_path / "work"
    path.touch()
    with claimed(path) as mine:
        assert not mine


def test_a_failure_frees_the_claim(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="midway"), claimed(tmp_path / "work"):
        raise RuntimeError("midway")
    assert not list(tmp_path.iterdir())


def test_a_dead_process_leaves_nothing_behind_that_counts(tmp_path: Path) -> None:
    path = tmp_path / "work"
    script = """
import os, sys
from pathlib import Path
from foretrace.distill.sampling.work_claims import claimed, share
with claimed(Path(sys.argv[1])) as mine:
    assert mine
    os.kill(os.getpid(), 9)
"""
    died = subprocess.run([sys.executable, "-c", script, str(path)], check=False)
    assert died.returncode == -9
    assert claim_of(path).exists()
    with claimed(path) as mine:
        assert mine


def test_a_silent_worker_elsewhere_is_given_up(tmp_path: Path) -> None:
    path = tmp_path / "work"
    claim_of(path).write_text('{"host": "another-machine", "process": 1}')
    with claimed(path) as mine:
        assert not mine  # touched just now: believed
    long_ago = claim_of(path).stat().st_mtime - work_claims.STALE_SECONDS - 1
    os.utime(claim_of(path), (long_ago, long_ago))
    with claimed(path) as mine:
        assert mine


def test_a_claim_that_was_taken_over_is_left_alone(tmp_path: Path) -> None:
    """A worker that was given up, and comes back, does not free what is another's."""
    path = tmp_path / "work"
    with claimed(path) as mine:
        assert mine
        claim_of(path).write_text('{"name": "other", "host": "another-machine", "process": 1}')
    assert claim_of(path).exists()


def test_a_takeover_removes_what_was_half_written(tmp_path: Path) -> None:
    path = tmp_path / "work"
    claim_of(path).write_text('{"host": "another-machine", "process": 1}')
    os.utime(claim_of(path), (1.0, 1.0))
    (tmp_path / ".work.0123.partial").touch()
    (tmp_path / ".other.0123.partial").touch()
    with claimed(path) as mine:
        assert mine
        assert not (tmp_path / ".work.0123.partial").exists()
        assert (tmp_path / ".other.0123.partial").exists()


def test_sharing_waits_for_others_and_stops_when_told(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "abc"]
    with claimed(paths[0]) as mine:
        assert mine
        share(paths, lambda number, path: path.touch(), until=paths[2].exists)
    assert not paths[0].exists()
    assert paths[2].exists()
    made: list[int] = []

    def make(number: int, path: Path) -> None:
        made.append(number)
        path.touch()

    share(paths, make)
    assert made == [0]


def test_a_living_worker_keeps_its_claim_fresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_claims, "BEAT_SECONDS", 0.01)
    path = tmp_path / "work"
    with claimed(path) as mine:
        assert mine
        os.utime(claim_of(path), (1.0, 1.0))
        for _ in range(500):
            if claim_of(path).stat().st_mtime > 1.0:
                break
            time.sleep(0.01)
        assert claim_of(path).stat().st_mtime > 1.0
