"""Negative log-likelihood of texts under a language model, from which perplexity follows."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foretrace.engines.transformers.padding import model_inputs, pad_left

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BATCH = 50


@torch.inference_mode()
def mean_nll(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[str],
    texts: Sequence[Sequence[str]],
    *,
    bos_token_id: int | None = None,
    observe: Callable[[int, int], None] = lambda done, total: None,
) -> list[list[float | None]]:
    """Compute the mean negative log-likelihood per token of each prompt's continuations, in nats.

    A continuation without tokens has None. Prompt and continuation are tokenized together: the
    tokens beyond the number of the prompt's tokens are those of the continuation. `bos_token_id` is
    prepended to every prompt.
    """
    start = [] if bos_token_id is None else [bos_token_id]
    pairs = [
        (prompt, text)
        for prompt, prompt_texts in zip(prompts, texts, strict=True)
        for text in prompt_texts
    ]
    losses: list[float | None] = []
    for first in range(0, len(pairs), BATCH):
        batch = pairs[first : first + BATCH]
        rows, prompt_rows = (
            [[*start, *ids] for ids in tokenizer(strings, add_special_tokens=not start).input_ids]
            for strings in (
                [prompt + text for prompt, text in batch],
                [prompt for prompt, _ in batch],
            )
        )
        # The first token of a row has no prediction, so it is never scored.
        counts = [
            max(0, len(row) - max(1, len(prompt_row)))
            for row, prompt_row in zip(rows, prompt_rows, strict=True)
        ]
        losses += _batch_nll(model, rows, counts)
        observe(first + len(batch), len(pairs))
    remaining = iter(losses)
    return [[next(remaining) for _ in prompt_texts] for prompt_texts in texts]


def _batch_nll(
    model: "PreTrainedModel", rows: Sequence[Sequence[int]], counts: Sequence[int]
) -> list[float | None]:
    """Compute the mean loss of the last `counts` tokens of each row."""
    longest = max(counts)
    if not longest:
        return [None] * len(rows)
    inputs = model_inputs(*pad_left(rows, 0), model.device)
    logits: Tensor = model(**inputs, logits_to_keep=longest + 1).logits[:, -longest - 1 : -1]
    targets = inputs["input_ids"][:, -longest:, None]
    # One row at a time: a float32 copy of the whole batch would be hundreds of megabytes, twice.
    return [
        float(_token_nll(row_logits, row_targets)[longest - count :].mean()) if count else None
        for count, row_logits, row_targets in zip(counts, logits, targets, strict=True)
    ]


def _token_nll(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute the negative log-likelihood of tokens: (T, V) logits, (T, 1) ids -> (T,)."""
    logits = logits.float()
    return logits.logsumexp(-1) - logits.gather(-1, targets)[:, 0]
