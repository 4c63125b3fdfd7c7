"""Score texts in retrospect: their probability, bare and steered, and what steering would cost."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

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


class TextScores(NamedTuple):
    """Log-probabilities under the bare LM, row 0, and under each goal, the rows after it."""

    texts: Tensor  # (1 + goals, texts)
    first: Tensor  # (1 + goals, V): those of every first token


@torch.inference_mode()
def score_texts(
    lm: Any,
    goals: Sequence[ft.CompiledGoal],
    prompt: Sequence[int],
    texts: Sequence[Sequence[int]],
    *,
    ends: Sequence[int] = (),
    limit: int = 64,
) -> TextScores:
    """Score texts that go on from one prompt, bare and steered toward each goal.

    Args:
        lm: A causal LM of transformers.
        goals: The goals.
        prompt: The token ids of the prompt.
        texts: The token ids of each text.
        ends: Tokens that end a text.
        limit: How many tokens the steered LM may write after the prompt.
    """
    prefixes = list(dict.fromkeys(tuple(text[:k]) for text in texts for k in range(len(text))))
    bare = _logits_after(lm, prompt, prefixes)
    steered = bare.repeat(1 + len(goals), 1)
    if goals:
        requests = [Request(goal, tuple(prompt), limit, stop_ids=tuple(ends)) for goal in goals]
        _steer_(steered[len(bare) :], requests, prefixes)
    nats = steered.log_softmax(-1).view(1 + len(goals), *bare.shape)
    index = {prefix: row for row, prefix in enumerate(prefixes)}
    totals = [
        sum(
            (nats[:, index[tuple(text[:k])], token] for k, token in enumerate(text)),
            start=torch.zeros(len(nats)),
        )
        for text in texts
    ]
    return TextScores(torch.stack(totals, 1), nats[:, 0])


def _logits_after(lm: Any, prompt: Sequence[int], prefixes: Sequence[tuple[int, ...]]) -> Tensor:
    """Return the LM's logits after the prompt and each prefix: (prefixes, V)."""
    longest = [p for p in prefixes if not any(q[:-1] == p for q in prefixes if q)]
    rows = [torch.tensor([*prompt, *prefix]) for prefix in longest]
    ids = pad_sequence(rows, batch_first=True)  # what follows a token does not change its logits
    keep = max(map(len, longest)) + 1
    positions = torch.arange(ids.shape[1]).expand_as(ids)  # control vectors need those of each row
    logits: Tensor = lm(ids, position_ids=positions, logits_to_keep=keep).logits.float()
    row_of = {row[:k]: i for i, row in enumerate(longest) for k in range(len(row) + 1)}
    return torch.stack([logits[row_of[prefix], len(prefix)] for prefix in prefixes])


def _steer_(logits: Tensor, requests: Sequence[Request], prefixes: list[tuple[int, ...]]) -> None:
    """Steer the logits after each prefix, in place: (requests * prefixes, V)."""
    goal, slots = requests[0].goal, list(range(len(logits)))
    assert goal is not None
    rows = [request for request in requests for _ in prefixes]
    steering = Steering(goal.hmm)
    steering.start(dict(enumerate(rows)), dict(enumerate(prefixes * len(requests))))
    steering.reweight_(logits, slots)
