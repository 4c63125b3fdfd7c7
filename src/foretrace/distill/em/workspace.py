"""Working memory that is kept from batch to batch, since fresh pages cost time."""

from math import prod

import torch
from torch import Tensor


class Workspace:
    """Tensors by name, on the device of `like`, grown as needed and handed out again and again."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._held: dict[str, Tensor] = {}

    def room(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Give an uninitialised tensor; what was handed out under the same name is overwritten."""
        needed = prod(shape)
        held = self._held.get(name)
        if held is None or held.numel() < needed:
            held = self._held[name] = self._like.new_empty(needed, dtype=dtype)
        return held[:needed].view(shape)
