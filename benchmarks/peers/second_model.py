"""The logits of a model that reads along while the language model generates."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from foretrace.engines.transformers.padding import model_inputs, pad_left
from foretrace.evaluate.plugin import Prompts


class SecondModel:
    """Reads prompts and the tokens that are generated, and predicts the next ones.

    Args:
        model: The model, which may be the language model itself.
        prompts: The token ids of each prompt. They may differ from those of the language model.
    """

    def __init__(self, model: PreTrainedModel, prompts: Prompts) -> None:
        self.model, self.prompts = model, prompts
        self.cache = DynamicCache()
        self.mask: Tensor | None = None  # until the prompts are read

    def next_logits(self, ids: Tensor) -> Tensor:
        """Return the logits of the next token of every row: (rows, T) ids -> (rows, V) float32.

        The first call reads the prompts. Later ones read the last token of each row.
        """
        if self.mask is not None:
            self.mask = torch.nn.functional.pad(self.mask, (0, 1), value=1)
            return self._forward(ids[:, -1:], self.mask)
        copies = len(ids) // len(self.prompts)
        prompt_ids, mask = pad_left(self.prompts, 0)
        logits = self._forward(prompt_ids, mask).repeat_interleave(copies, 0)
        self.cache.batch_repeat_interleave(copies)
        self.mask = mask.repeat_interleave(copies, 0)
        return logits

    def _forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        inputs = model_inputs(ids, mask, self.model.device)
        output = self.model(**inputs, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        logits: Tensor = output.logits[:, -1]
        return logits.float()


def insert_text(prompts: Prompts, text: Sequence[int], special: Sequence[int]) -> list[list[int]]:
    """Insert tokens before each prompt, after a special token that it begins with."""
    starts = [int(bool(prompt) and prompt[0] in special) for prompt in prompts]
    return [
        [*prompt[:start], *text, *prompt[start:]]
        for prompt, start in zip(prompts, starts, strict=True)
    ]
