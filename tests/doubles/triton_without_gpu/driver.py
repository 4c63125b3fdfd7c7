"""A driver of the CPU, in name only."""

from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class InterpretedDriver(DriverBase):  # type: ignore[misc]
    """What Triton wants to know of a device."""

    def __init__(self) -> None:
        """Nothing is loaded."""

    @classmethod
    def is_active(cls) -> bool:
        """Always there."""
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Never compiled."""
        return ty

    def get_current_target(self) -> Any:
        """A CPU, without warps."""
        return GPUTarget("cpu", 0, 1)

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def set_current_device(self, device: int) -> None:
        """There is no other."""

    def get_current_stream(self, device: int | None = None) -> int:
        """There is no other."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Where tensors are."""
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        """What torch offers for it."""
        return torch.cpu

    def get_benchmarker(self) -> Any:
        """Nothing is tuned."""
        return lambda call, **_: [0.0]

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        """Nothing is tuned."""
        return torch.empty(0)

    def clear_cache(self, cache: torch.Tensor) -> None:
        """Nothing is tuned."""
