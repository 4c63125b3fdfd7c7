"""Slabs: tensors whose rows belong to different owners."""

from math import prod

import torch
from torch import Tensor

GROWTH = 1.25  # of a slab that is full


class Slab:
    """Rows of equal size in one tensor, so that a batch can gather rows of different owners.

    Attributes:
        data: The tensor, (capacity, ...). It is replaced when the slab grows.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        """Create a slab without rows; `shape` is the shape of one row."""
        self.data = torch.zeros(0, *shape, dtype=dtype, device=device)
        self._free: list[tuple[int, int]] = []  # ranges (first, count), ascending

    @property
    def nbytes(self) -> int:
        """The size in bytes, with the rows that are not in use."""
        return self.data.nbytes

    def growth(self, count: int) -> int:
        """Return by how many bytes the slab would grow to hold `count` more rows."""
        if any(length >= count for _, length in self._free):
            return 0
        return self._added(count) * self.data.element_size() * prod(self.data.shape[1:])

    def write(self, values: Tensor) -> int:
        """Copy rows into the slab, and return the index of the first."""
        first = self._take(len(values))
        self.data[first : first + len(values)] = values.to(self.data, non_blocking=True)
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
            self._grow(self._added(count))
            return self._take(count)
        length, first = min(fitting)
        self._free.remove((first, length))
        if length > count:
            self.free(first + count, length - count)
        return first

    def _added(self, count: int) -> int:
        """Return how many rows to append: copies of the slab must be rare."""
        return max(count, int((GROWTH - 1) * len(self.data)))

    def _grow(self, added: int) -> None:
        old = self.data
        self.data = old.new_zeros(len(old) + added, *old.shape[1:])
        self.data[: len(old)] = old
        self.free(len(old), added)
