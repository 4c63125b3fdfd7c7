"""Copy small lists to a device without waiting for it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(values: Sequence[Any], device: torch.device) -> Tensor:
    """Copy numbers to a device. Unlike `torch.tensor(..., device=...)`, do not wait for it."""
    return torch.tensor(values).to(device, non_blocking=True)


class Transfer:
    """Copies rows of numbers to a device, from pinned memory, without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        """Create a transfer to a device."""
        self.device = device

    def integers(self, rows: Sequence[Sequence[int]], width: int) -> Tensor:
        """Copy rows of `width` integers as columns: (width, rows) int64."""
        return self._copy(np.array(rows, dtype=np.int64).reshape(-1, width))

    def floats(self, rows: Sequence[Sequence[float]], width: int) -> Tensor:
        """Copy rows of `width` numbers as columns: (width, rows) float64."""
        return self._copy(np.array(rows, dtype=np.float64).reshape(-1, width))

    def _copy(self, rows: NDArray[np.int64] | NDArray[np.float64]) -> Tensor:
        columns = torch.from_numpy(np.ascontiguousarray(rows.T))
        if self.device.type == "cuda" and torch.cuda.is_available():
            columns = columns.pin_memory()
        return columns.to(self.device, non_blocking=True)
