"""Score texts in retrospect: what the LM expected at every token, and what steering would cost."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import foretrace as ft
from foretrace.lookahead.price import prices
from foretrace.steering import Request, SlotSteering


@torch.inference_mode()
def text_logits(lm: Any, prompt: Sequence[int], text: Sequence[int]) -> Tensor:
    """Return the LM's logits at every position of a text: (T, V)."""
    ids = torch.tensor([[*prompt, *text[:-1]]])
    logits: Tensor = lm(ids, logits_to_keep=len(text)).logits[0, -len(text) :]
    return logits.float()


@torch.inference_mode()
def retrospect(
    lm: Any,
    goals: Sequence[ft.Goal],
    prompt: Sequence[int],
    text: Sequence[int],
    ends: Sequence[int],
) -> Tensor:
    """Return the price of steering toward each goal at every position of a text: (T, goals)."""
    steering = SlotSteering(goals[0].lookahead.hmm)
    requests = [Request((goal,), tuple(prompt), len(text), ends=tuple(ends)) for goal in goals]
    slots = list(range(len(goals)))
    steering.read_generated(slots, requests, [[]] * len(goals))
    spent = []
    for token, logits in zip(text, text_logits(lm, prompt, text), strict=True):
        bare = logits.expand(len(goals), -1)
        spent.append(prices(bare, steering.reweight_(bare.clone(), slots)))
        steering.advance(slots, torch.full((len(goals),), token))
    return torch.stack(spent)
