"""The logits of a model that reads along while the language model generates."""

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedModel

from foretrace.engines.transformers.batch import LMBatch
from foretrace.evaluate.plugin import Prompts


class SecondModel:
    """Reads prompts and the tokens that are generated, and predicts the next ones.

    Args:
        model: The model, which may be the language model itself.
        prompts: The token ids of each prompt. They may differ from those of the language model.
    """

    def __init__(self, model: PreTrainedModel, prompts: Prompts) -> None:
        self.model, self.prompts = model, prompts
        self.rows: LMBatch | None = None  # until the prompts are read

    def next_logits(self, ids: Tensor) -> Tensor:
        """Return the logits of the next token of every row: (rows, T) ids -> (rows, V) float32.

        The first call reads the prompts. Later ones read the last token of each row.
        """
        if self.rows is None:
            self.rows = LMBatch(self.model, self.prompts, len(ids) // len(self.prompts))
        else:
            self.rows.append(ids[:, -1])
        return self.rows.logits


def insert_text(prompts: Prompts, text: Sequence[int], special: Sequence[int]) -> list[list[int]]:
    """Insert tokens before each prompt, after a special token that it begins with."""
    starts = [int(bool(prompt) and prompt[0] in special) for prompt in prompts]
    return [
        [*prompt[:start], *text, *prompt[start:]]
        for prompt, start in zip(prompts, starts, strict=True)
    ]
