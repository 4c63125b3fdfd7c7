"""A tensor of rows that grows, of which contiguous ranges are taken and given back."""

import torch
from torch import Tensor


class Slab:
    """Rows of equal size in one tensor, so that a batch can gather rows of different owners.

    Attributes:
        rows: The tensor, (capacity, ...). It is replaced when the slab grows.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        """Create a slab without rows; `shape` is that of one row."""
        self.rows = torch.zeros(0, *shape, dtype=dtype, device=device)
        self._free: list[tuple[int, int]] = []  # ranges (first, count), ascending

    @property
    def nbytes(self) -> int:
        """The size in bytes, with the rows that are not in use."""
        return self.rows.nbytes

    def write(self, values: Tensor) -> int:
        """Copy rows into the slab, and return the index of the first."""
        first = self._take(len(values))
        self.rows[first : first + len(values)] = values.to(self.rows, non_blocking=True)
        return first

    def free(self, first: int, count: int) -> None:
        """Give rows back."""
        merged: list[tuple[int, int]] = []
        for start, length in sorted([*self._free, (first, count)]):
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self._free = merged

    def _take(self, count: int) -> int:
        """Take a range of free rows, the smallest that is large enough."""
        fitting = [(length, first) for first, length in self._free if length >= count]
        if not fitting:
            self._grow(count)
            return self._take(count)
        length, first = min(fitting)
        self._free.remove((first, length))
        if length > count:
            self.free(first + count, length - count)
        return first

    def _grow(self, count: int) -> None:
        """Append at least `count` free rows, and as many as there are, so that copies are rare."""
        old = self.rows
        added = max(count, len(old))
        self.rows = old.new_zeros(len(old) + added, *old.shape[1:])
        self.rows[: len(old)] = old
        self.free(len(old), added)
