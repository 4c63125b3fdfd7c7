"""Score texts in retrospect: what the LM expected at every token, and what steering would cost."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import foretrace as ft
from foretrace.steering import Request, Steering


@torch.inference_mode()
def text_logits(lm: Any, prompt: Sequence[int], text: Sequence[int]) -> Tensor:
    """Return the LM's logits at every position of a text: (T, V)."""
    ids = torch.tensor([[*prompt, *text[:-1]]])
    logits: Tensor = lm(ids, logits_to_keep=len(text)).logits[0, -len(text) :]
    return logits.float()


@torch.inference_mode()
def retrospect(
    lm: Any,
    goals: Sequence[ft.CompiledGoal],
    prompt: Sequence[int],
    text: Sequence[int],
    ends: Sequence[int],
) -> Tensor:
    """Return the price of steering toward each goal at every position of a text: (T, goals)."""
    steering, slots, spent = Steering(goals[0].hmm), list(range(len(goals))), []
    requests = [Request(goal, tuple(prompt), len(text), stop_ids=tuple(ends)) for goal in goals]
    steering.start(dict(enumerate(requests)))
    for token, logits in zip(text, text_logits(lm, prompt, text), strict=True):
        prices = steering.reweight_(logits.repeat(len(goals), 1), slots, measure=True)
        assert prices is not None
        spent.append(prices.nats)
        steering.advance(slots, torch.full((len(goals),), token))
    return torch.stack(spent)
