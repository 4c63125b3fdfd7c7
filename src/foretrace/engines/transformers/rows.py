"""A batch of sequences that a language model of transformers reads token by token."""

from collections.abc import Sequence
from copy import deepcopy
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foretrace.engines.transformers.padding import model_inputs, pad_left

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Rows:
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
        from foretrace.engines.transformers.growing_cache import growing_cache

        self.model, self.cache = model, growing_cache()
        ids, self.mask = pad_left(prompts, 0)
        with torch.inference_mode():
            self.logits = self._forward(ids).repeat_interleave(copies, 0)
            self.cache.batch_repeat_interleave(copies)
        self.mask = self.mask.repeat_interleave(copies, 0)

    def __deepcopy__(self, memo: object) -> "Rows":
        """Copy what was read, but not the model."""
        copied = object.__new__(Rows)
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
