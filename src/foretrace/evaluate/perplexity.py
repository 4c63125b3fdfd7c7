"""Negative log-likelihood of texts under a language model, from which perplexity follows."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foretrace.engines.transformers.batch import model_inputs, pad_left
from foretrace.engines.transformers.nucleus import token_nats

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_ROWS, MAX_TOKENS = 50, 2_048  # of a batch: logits of 2,048 tokens take 400 MB in SmolLM2
Encode = Callable[[Sequence[str]], Sequence[Sequence[int]]]
"""A function from texts to token ids, such as `ContinuationGenerator.encode`."""


@torch.inference_mode()
def token_nll(
    model: "PreTrainedModel",
    encode: Encode,
    prompts: Sequence[str],
    texts: Sequence[Sequence[str]],
    *,
    known: Sequence[Sequence[Sequence[float] | None]] | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[list[list[float]]]:
    """Compute the negative log-likelihood of every token of each prompt's continuations, in nats.

    Prompt and continuation are encoded together. The continuation begins after the number of
    tokens of the prompt. The model reads only the texts whose losses are not `known`.
    """
    known = known or [[None] * len(prompt_texts) for prompt_texts in texts]
    pairs = [
        (prompt, text)
        for prompt, prompt_texts, losses in zip(prompts, texts, known, strict=True)
        for text, text_losses in zip(prompt_texts, losses, strict=True)
        if text_losses is None
    ]
    read = iter(_read_pairs(model, encode, pairs, on_progress))
    return [
        [next(read) if losses is None else list(losses) for losses in prompt_losses]
        for prompt_losses in known
    ]


def _read_pairs(
    model: "PreTrainedModel",
    encode: Encode,
    pairs: Sequence[tuple[str, str]],
    on_progress: Callable[[int, int], None],
) -> list[list[float]]:
    """Compute the losses of pairs of a prompt and its continuation."""
    if not pairs:
        return []
    rows = encode([prompt + text for prompt, text in pairs])
    prompt_rows = encode([prompt for prompt, _ in pairs])
    # The first token of a row has no prediction, so it is never scored.
    counts = [
        max(0, len(row) - max(1, len(prompt_row)))
        for row, prompt_row in zip(rows, prompt_rows, strict=True)
    ]
    nats: list[list[float]] = []
    for batch in _batches(counts):
        nats += _batch_nll(model, rows[batch], counts[batch])
        on_progress(batch.stop, len(pairs))
    return nats


def _batches(counts: Sequence[int]) -> Iterator[slice]:
    """Yield batches of rows, whose logits fit into memory."""
    start = 0
    for end in range(1, len(counts) + 1):
        size = end + 1 - start  # of the batch with the next row
        if (
            end == len(counts)
            or size > MAX_ROWS
            or size * max(counts[start : end + 1]) > MAX_TOKENS
        ):
            yield slice(start, end)
            start = end


def _batch_nll(
    model: "PreTrainedModel", rows: Sequence[Sequence[int]], counts: Sequence[int]
) -> list[list[float]]:
    """Compute the loss of the last `counts` tokens of each row."""
    longest = max(counts)
    if not longest:
        return [[] for _ in rows]
    inputs = model_inputs(*pad_left(rows, 0), model.device)
    logits: Tensor = model(**inputs, logits_to_keep=longest + 1).logits[:, -longest - 1 : -1]
    targets = inputs["input_ids"][:, -longest:]
    # One row at a time: a float32 copy of the whole batch would be hundreds of megabytes, twice.
    return [
        token_nats(row_logits.float(), row_targets)[longest - count :].tolist()
        for count, row_logits, row_targets in zip(counts, logits, targets, strict=True)
    ]
