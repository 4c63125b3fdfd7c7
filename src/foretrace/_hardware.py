"""Choose settings that depend on the hardware: the dtype of a language model, and threads.

This module imports torch on first use, so that the command line can import it cheaply.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CPUINFO = Path("/proc/cpuinfo")
NATIVE_BFLOAT16 = ("amx_bf16", "avx512_bf16")  # flags of x86 CPUs that multiply in bfloat16


def default_dtype(device: "torch.device | str") -> "torch.dtype":
    """Return the dtype in which a language model runs fast on a device.

    This is bfloat16 where the hardware has it natively, else float16 on CUDA and float32 elsewhere.
    """
    return _choose(device)[0]


def describe_dtype(device: "torch.device | str") -> str:
    """Return the default dtype and its reason: "float32 (this CPU has no native bfloat16)"."""
    dtype, reason = _choose(device)
    return f"{str(dtype).removeprefix('torch.')} ({reason})"


def _choose(device: "torch.device | str") -> "tuple[torch.dtype, str]":
    import torch

    device = torch.device(device)
    if device.type == "cuda":
        # Emulated bfloat16, on GPUs before Ampere, is slower than float16.
        with torch.cuda.device(device):
            native = torch.cuda.is_bf16_supported(including_emulation=False)
        if native:
            return torch.bfloat16, "this GPU has native bfloat16"
        return torch.float16, "this GPU has no native bfloat16"
    if device.type != "cpu":
        return torch.float32, f"the safe choice on {device.type}"
    flag = _bfloat16_flag()
    if flag is not None:
        return torch.bfloat16, f"this CPU has native bfloat16: {flag}"
    return torch.float32, "this CPU has no native bfloat16"


def _bfloat16_flag() -> str | None:
    """Return the CPU's flag for native bfloat16, or None if there is none or it is not known.

    Torch has no public function for this. Without native instructions, torch emulates bfloat16
    matrix products. This is several times slower than float32.
    """
    try:
        lines = CPUINFO.read_text("utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        return None
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "flags":
            flags = value.split()
            return next((flag for flag in NATIVE_BFLOAT16 if flag in flags), None)
    return None


def available_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def share_cores(processes: int) -> Iterator[None]:
    """Limit torch's threads to the share of the cores of one of several processes that compute.

    Idle threads of torch spin while they wait. Processes with more threads than cores in total
    therefore slow each other down severalfold.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(min(threads, max(1, available_cores() // processes)))
    try:
        yield
    finally:
        torch.set_num_threads(threads)
