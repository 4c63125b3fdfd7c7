"""Batches of sequences that a language model of transformers reads token by token."""

from collections.abc import Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def pad_left(prompts: Sequence[Sequence[int]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Pad prompts on the left; return their ids and their mask, (n, longest) each.

    The mask marks the padding, so any token id can be used: some tokenizers have no pad token.
    """
    longest = max(map(len, prompts))
    rows = [[pad_token_id] * (longest - len(ids)) + list(ids) for ids in prompts]
    masks = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]
    return torch.tensor(rows), torch.tensor(masks)


def model_inputs(ids: Tensor, mask: Tensor, device: torch.device) -> dict[str, Tensor]:
    """Return the inputs of a model for the last ids of rows that are padded on the left.

    Args:
        ids: New token ids, (n, T).
        mask: Mask of the whole rows, (n, T or more); 0 where padded.
        device: The model's device.
    """
    positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, -ids.shape[1] :]
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def cut_at_end(tokens: list[int], ends: Sequence[int]) -> list[int]:
    """Drop the padding after the first end-of-text token; that token is kept."""
    last = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: last + 1]


class LMBatch:
    """A batch of sequences, and the LM's logits of their next tokens.

    Reads each prompt once for all its copies.

    Args:
        model: A causal LM of transformers.
        prompts: Token ids of each prompt.
        copies: Sequences of each prompt. They are next to each other.

    Attributes:
        mask: 1 for tokens and 0 for padding on the left, (n, T).
        logits: The logits of the next tokens, (n, V) float32.
    """

    def __init__(
        self, model: "PreTrainedModel", prompts: Sequence[Sequence[int]], copies: int = 1
    ) -> None:
        self.model, self.cache = model, growing_cache()
        ids, self.mask = pad_left(prompts, 0)
        with torch.inference_mode():
            self.logits = self._forward(ids).repeat_interleave(copies, 0)
            self.cache.batch_repeat_interleave(copies)
        self.mask = self.mask.repeat_interleave(copies, 0)

    def __deepcopy__(self, memo: object) -> "LMBatch":
        """Copy what was read, but not the model."""
        copied = object.__new__(LMBatch)
        copied.__dict__ |= {**self.__dict__, "cache": deepcopy(self.cache)}
        return copied

    @torch.inference_mode()
    def append(self, tokens: Tensor) -> None:
        """Append a token to each row: (n,)."""
        self.mask = torch.nn.functional.pad(self.mask, (0, 1), value=1)
        self.logits = self._forward(tokens[:, None])

    def _forward(self, ids: Tensor) -> Tensor:
        inputs = model_inputs(ids, self.mask, self.model.device)
        output = self.model(**inputs, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        logits: Tensor = output.logits[:, -1]
        return logits.float()


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
    """The cache of one layer. Its keys and values are views of memory that has room for more.

    `DynamicCache` of transformers copies all keys and values at every step. With 200 rows of 300
    tokens, this takes longer than the rest of the step.
    """

    _buffers: tuple[_Buffer, _Buffer]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values; return all."""
        if self.keys is None:
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
