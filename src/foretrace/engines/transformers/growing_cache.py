"""A cache of keys and values that appends in place.

`DynamicCache` of transformers copies all keys and values at every step. With 200 rows of 300
tokens, this takes longer than the rest of the step.
"""

from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


class _Buffer:
    """Memory for the keys or the values of a layer, which doubles when it is full."""

    def __init__(self) -> None:
        self.memory: Tensor | None = None

    def append(self, held: Tensor | None, new: Tensor) -> Tensor:
        """Append along the next-to-last dimension; copy `held` only if it is not in this memory."""
        if held is None or not held.numel():
            held = new[..., :0, :]
        size, end = held.shape[-2], held.shape[-2] + new.shape[-2]
        memory = self.memory
        if memory is None or held.data_ptr() != memory.data_ptr() or end > memory.shape[-2]:
            self.memory = memory = new.new_empty(*new.shape[:-2], max(2 * size, end), new.shape[-1])
            memory[..., :size, :] = held
        memory[..., size:end, :] = new
        return memory[..., :end, :]


class GrowingLayer(DynamicLayer):
    """The cache of one layer. Its keys and values are views of memory that has room for more."""

    _buffers: tuple[_Buffer, _Buffer]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values; return all."""
        if not self.is_initialized:
            self._buffers = _Buffer(), _Buffer()
            return super().update(key_states, value_states, *args, **kwargs)
        keys, values = self._buffers
        self.keys = keys.append(self.keys, key_states)
        self.values = values.append(self.values, value_states)
        return self.keys, self.values


def growing_cache() -> DynamicCache:
    """Return an empty cache, for any number of layers."""
    cache = DynamicCache()
    cache.layer_class_to_replicate = GrowingLayer
    return cache
