"""The executor of one process, on a disk that is full."""

import subprocess
from pathlib import Path

import pytest

import squares
from foretrace import _io
from foretrace.distill.executor import LocalExecutor


def test_a_full_disk(tmp_path: Path) -> None:
    """The error names the folder, complete files stay, and the rest is produced later."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a small disk")
    try:
        executor, load = LocalExecutor(), squares.stage(disk, size=2000)
        with (
            executor.workers("squares", load) as produce,
            pytest.raises(OSError, match=r"disk cannot be written to.*No space left.*free some"),
        ):
            list(produce(range(20)))
        complete = squares.read(disk)
        assert 0 < len(complete) < 20
        subprocess.run(["mount", "-o", "remount,size=1m", disk], check=True)
        missing = _io.missing_files(disk / f"{n}.safetensors" for n in range(20))
        with executor.workers("squares", load) as produce:
            assert sum(produce(missing)) == 20 - len(complete)
        assert squares.read(disk) == {f"{n}.safetensors": n**2 for n in sorted(range(20), key=str)}
    finally:
        subprocess.run(["umount", disk], check=True)
