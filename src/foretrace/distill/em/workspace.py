"""Buffers that are reused from batch to batch, because allocating fresh pages costs time."""

from math import prod

import torch
from torch import Tensor


class Workspace:
    """A set of named buffers on the device of `like`, each grown as needed and then reused."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._buffers: dict[str, Tensor] = {}

    def buffer(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return an uninitialised tensor; it overwrites the last one of the same name."""
        size = prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = self._like.new_empty(size, dtype=dtype)
        return buffer[:size].view(shape)
