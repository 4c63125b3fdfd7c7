"""How surprised a language model is by what others wrote."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foretrace.engines.transformers.padding import model_inputs, pad_left

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BATCH = 50


@torch.inference_mode()
def surprise(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[str],
    texts: Sequence[Sequence[str]],
    *,
    begin: int | None = None,
    observe: Callable[[int, int], None] = lambda done, total: None,
) -> list[list[float | None]]:
    """Give the nats per token of each prompt's continuations; None of one without tokens.

    Prompt and continuation are tokenized together, as a reader would: what is more than the
    prompt's own tokens is the continuation. `begin` is the token that texts begin with.
    """
    start = [] if begin is None else [begin]
    flat = [(prompt, text) for prompt, own in zip(prompts, texts, strict=True) for text in own]
    found: list[float | None] = []
    for first in range(0, len(flat), BATCH):
        batch = flat[first : first + BATCH]
        whole, lead = (
            [[*start, *ids] for ids in tokenizer(each, add_special_tokens=not start).input_ids]
            for each in ([prompt + text for prompt, text in batch], [prompt for prompt, _ in batch])
        )
        counts = [max(0, len(ids) - max(1, len(own))) for ids, own in zip(whole, lead, strict=True)]
        found += _nats(model, whole, counts)
        observe(first + len(batch), len(flat))
    rows = iter(found)
    return [[next(rows) for _ in own] for own in texts]


def _nats(
    model: "PreTrainedModel", rows: Sequence[Sequence[int]], counts: Sequence[int]
) -> list[float | None]:
    """Score the last `counts` tokens of each row."""
    most = max(counts)
    if not most:
        return [None] * len(rows)
    given = model_inputs(*pad_left(rows, 0), model.device)
    logits: Tensor = model(**given, logits_to_keep=most + 1).logits[:, -most - 1 : -1]
    chosen = given["input_ids"][:, -most:, None]
    # Row by row: all at once in float32 they would be hundreds of megabytes, twice.
    return [
        float(_log_losses(*each)[most - count :].mean()) if count else None
        for count, *each in zip(counts, logits, chosen, strict=True)
    ]


def _log_losses(logits: Tensor, tokens: Tensor) -> Tensor:
    """Give minus the log-probability of tokens: (T, V) logits, (T, 1) ids -> (T,)."""
    wide = logits.float()
    return wide.logsumexp(-1) - wide.gather(-1, tokens)[:, 0]
