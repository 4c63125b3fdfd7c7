"""Steering in MLX-LM."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from foretrace.engines.host import HostProcessor
from foretrace.steering import CompiledGoal

if TYPE_CHECKING:
    import mlx.core as mx


def logits_processor(
    goal: CompiledGoal, *, max_new_tokens: int, stop_ids: Sequence[int] = ()
) -> "Callable[[mx.array, mx.array], mx.array]":
    """Return a logits processor for one text of MLX-LM.

    Pass it to `mlx_lm.generate(..., logits_processors=[processor])`. The HMM stays with torch, on
    the CPU: copying the logits of every token is cheap where memory is shared. A `draft_model` is
    not supported: MLX-LM does not pass the prompt to processors then.

    Args:
        goal: The goal.
        max_new_tokens: The `max_tokens` of MLX-LM.
        stop_ids: Tokens that end a text, in addition to the HMM's: `tokenizer.eos_token_ids`.
    """
    import mlx.core as mx

    host = HostProcessor(goal, max_new_tokens=max_new_tokens, stop_ids=stop_ids)

    def process(tokens: "mx.array", logits: "mx.array") -> "mx.array":
        """Reweight the next token: ids (length,) and logits (1, V)."""
        steered = host(np.array(tokens), np.array(logits[0].astype(mx.float32)))
        return mx.array(steered)[None]

    return process
