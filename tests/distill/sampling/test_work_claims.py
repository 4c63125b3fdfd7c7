"""Claims: one worker at a time, and claims of dead workers are taken over."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from foretrace import _hardware
from foretrace.distill.sampling import work_claims
from foretrace.distill.sampling.work_claims import claim_work, share_work


def claim_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.claim")


def test_one_worker_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "work"
    with claim_work(path) as claimed, claim_work(path) as other:
        assert claimed
        assert not other
        assert claim_of(path).exists()
    assert not claim_of(path).exists()
    with claim_work(path) as again:
        assert again


def test_finished_work_is_not_claimed(tmp_path: Path) -> None:
    path = tmp_path / "work"
    path.touch()
    with claim_work(path) as claimed:
        assert not claimed


def test_an_error_releases_the_claim(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="midway"), claim_work(tmp_path / "work"):
        raise RuntimeError("midway")
    assert not list(tmp_path.iterdir())


def test_the_claim_of_a_dead_process_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "work"
    script = """
import os, sys
from pathlib import Path
from foretrace.distill.sampling.work_claims import claim_work, share_work
with claim_work(Path(sys.argv[1])) as claimed:
    assert claimed
    os.kill(os.getpid(), 9)
"""
    died = subprocess.run([sys.executable, "-c", script, str(path)], check=False)
    assert died.returncode == -9
    assert claim_of(path).exists()
    with claim_work(path) as claimed:
        assert claimed


def test_a_stale_claim_of_another_machine_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "work"
    claim_of(path).write_text('{"host": "another-machine", "process": 1}')
    with claim_work(path) as claimed:
        assert not claimed  # touched just now
    stale = claim_of(path).stat().st_mtime - work_claims.STALE_SECONDS - 1
    os.utime(claim_of(path), (stale, stale))
    with claim_work(path) as claimed:
        assert claimed


def test_a_claim_that_was_taken_over_is_not_released(tmp_path: Path) -> None:
    """A worker that resumes after others took over does not release their claim."""
    path = tmp_path / "work"
    with claim_work(path) as claimed:
        assert claimed
        claim_of(path).write_text('{"name": "other", "host": "another-machine", "process": 1}')
    assert claim_of(path).exists()


def test_a_takeover_removes_partial_files(tmp_path: Path) -> None:
    path = tmp_path / "work"
    claim_of(path).write_text('{"host": "another-machine", "process": 1}')
    os.utime(claim_of(path), (1.0, 1.0))
    (tmp_path / ".work.0123.partial").touch()
    (tmp_path / ".other.0123.partial").touch()
    with claim_work(path) as claimed:
        assert claimed
        assert not (tmp_path / ".work.0123.partial").exists()
        assert (tmp_path / ".other.0123.partial").exists()


def test_sharing_waits_for_others_and_stops_early(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "abc"]
    with claim_work(paths[0]) as claimed:
        assert claimed
        share_work(paths, lambda number, path: path.touch(), until=paths[2].exists)
    assert not paths[0].exists()
    assert paths[2].exists()
    made: list[int] = []

    def make(number: int, path: Path) -> None:
        made.append(number)
        path.touch()

    share_work(paths, make)
    assert made == [0]


def test_a_worker_touches_its_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_claims, "HEARTBEAT_SECONDS", 0.01)
    path = tmp_path / "work"
    with claim_work(path) as claimed:
        assert claimed
        os.utime(claim_of(path), (1.0, 1.0))
        for _ in range(500):
            if claim_of(path).stat().st_mtime > 1.0:
                break
            time.sleep(0.01)
        assert claim_of(path).stat().st_mtime > 1.0


def test_workers_on_one_machine_share_its_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other workers are simulated by claims: one alive, one dead, one on another machine."""
    monkeypatch.setattr(_hardware, "available_cores", lambda: 4)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    claims = [(work_claims._host(), os.getppid()), (work_claims._host(), dead.pid), ("other", 1)]
    for number, (host, process) in enumerate(claims):
        owner = {"name": "x", "host": host, "process": process}
        claim_of(tmp_path / f"other-{number}").write_text(json.dumps(owner))
    threads: list[int] = []

    def make(number: int, path: Path) -> None:
        threads.append(torch.get_num_threads())
        path.touch()

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        share_work([tmp_path / "work"], make)
        assert threads == [2]
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)
