"""The default dtype on simulated hardware, and the division of cores among processes."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from foretrace import _hardware
from foretrace._hardware import available_cores, default_dtype, describe_dtype, share_cores


def cpuinfo(path: Path, *flags: str) -> Path:
    path.write_text(
        "processor\t: 0\nmodel name\t: A CPU with bf16 in its name: avx512_bf16\n"
        f"flags\t\t: fpu sse2 {' '.join(flags)} avx512f\n\n"
    )
    return path


@pytest.mark.parametrize("flag", ["amx_bf16", "avx512_bf16"])
def test_a_cpu_with_native_bfloat16(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_hardware, "CPUINFO", cpuinfo(tmp_path / "cpuinfo", flag))
    assert default_dtype("cpu") is torch.bfloat16
    assert describe_dtype("cpu") == f"bfloat16 (this CPU has native bfloat16: {flag})"


def test_a_cpu_without_native_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_hardware, "CPUINFO", cpuinfo(tmp_path / "cpuinfo", "avx512_vnni"))
    assert default_dtype(torch.device("cpu")) is torch.float32
    assert describe_dtype("cpu") == "float32 (this CPU has no native bfloat16)"


def test_an_unknown_cpu_runs_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_hardware, "CPUINFO", tmp_path / "missing")
    assert default_dtype("cpu") is torch.float32
    arm = tmp_path / "cpuinfo"
    arm.write_text("processor\t: 0\nFeatures\t: fp asimd bf16\n")
    monkeypatch.setattr(_hardware, "CPUINFO", arm)
    assert default_dtype("cpu") is torch.float32


@pytest.mark.parametrize(
    ("native", "dtype"), [(True, torch.bfloat16), (False, torch.float16)], ids=["native", "none"]
)
def test_cuda(native: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_bf16_supported(including_emulation: bool = True) -> bool:
        return native or including_emulation  # as on a GPU that can emulate it

    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    assert default_dtype("cuda:1") is dtype
    assert describe_dtype("cuda").startswith(str(dtype).removeprefix("torch.") + " (")


def test_other_devices_run_in_float32() -> None:
    assert default_dtype("mps") is torch.float32
    assert describe_dtype("mps") == "float32 (the safe choice on mps)"


@pytest.fixture
def restored_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("processes", "before", "within"), [(1, 6, 6), (2, 6, 4), (3, 6, 2), (20, 6, 1), (2, 1, 1)]
)
def test_processes_share_the_cores(
    processes: int,
    before: int,
    within: int,
    monkeypatch: pytest.MonkeyPatch,
    restored_threads: None,
) -> None:
    monkeypatch.setattr(_hardware, "available_cores", lambda: 8)
    torch.set_num_threads(before)
    with share_cores(processes):
        assert torch.get_num_threads() == within
    assert torch.get_num_threads() == before


def test_there_is_a_core() -> None:
    assert available_cores() >= 1


def test_importing_does_not_load_torch() -> None:
    script = "import sys, foretrace._hardware; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
