"""Explanations of generated tokens: probability under the LM, EAP, and steered probability."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foretrace.errors import InvalidInputError
from foretrace.steering import Goal, PrefixTracker, Request

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Candidate:
    """A possible next token."""

    token: int
    lm: float
    """Probability under the language model."""
    eap: tuple[float, ...]
    """EAP of each goal after this token: eq. (EAP)."""
    steered: float
    """Probability after steering."""


@dataclass(frozen=True)
class Choice:
    """One position of a generated text."""

    written: Candidate
    """The token that was generated."""
    candidates: tuple[Candidate, ...]
    """The most probable tokens, bare or steered, and the generated one; by steered probability."""
    expected: tuple[float, ...]
    """EAP of each goal before this token: the mean over the LM's next tokens."""


@torch.inference_mode()
def explain(
    model: "PreTrainedModel",
    prompt: Sequence[int],
    written: Sequence[int],
    goals: Sequence[Goal],
    *,
    max_new_tokens: int | None = None,
    ends: Sequence[int] = (),
    candidates: int = 5,
) -> list[Choice]:
    """Explain every token of a continuation, whether it was steered or not.

    Args:
        model: A causal LM of transformers.
        prompt: Token ids of the prompt.
        written: Token ids of the continuation.
        goals: One goal or more.
        max_new_tokens: Tokens that the continuation could have had at most; by default, as many as
            it has.
        ends: Tokens that end a text, in addition to the HMM's.
        candidates: How many of the most probable tokens to list at each position.

    Returns:
        One `Choice` for each token of the continuation.

    Raises:
        InvalidInputError: There is no prompt, no continuation or no goal.

    Example:
        >>> from foretrace.engines.transformers.explain import explain
        >>> goal = ft.Goal(ft.Lookahead(hmm, attribute, horizon=8), strength=2.0)
        >>> choices = explain(model, [5, 6], [7, 8, 9], [goal], candidates=3)
        >>> [choice.written.token for choice in choices]
        [7, 8, 9]
    """
    if not prompt or not written or not goals:
        raise InvalidInputError(
            "Explaining needs a prompt, a continuation and at least one goal. One of them is empty."
        )
    limit = max(len(written), max_new_tokens or 0)
    # With strength 1 a goal's factor is its EAP: one row for each goal, after the steered row.
    requests = [
        Request(tuple(row_goals), tuple(prompt), limit, ends=tuple(ends))
        for row_goals in (goals, *([Goal(goal.lookahead)] for goal in goals))
    ]
    tracker = PrefixTracker(goals[0].lookahead.hmm, absolute=True)
    choices = []
    for position, logits in enumerate(_logits(model, prompt, written)):
        tracker.step(requests, [written[:position]] * len(requests))
        rows = torch.zeros(len(requests), len(logits), device=logits.device)
        rows[0] = logits
        steered, *log_eaps = tracker.reweight(rows)
        eaps = torch.stack(log_eaps).exp()  # (goals, V)
        choices.append(
            _choice(written[position], logits.softmax(-1), eaps, steered.softmax(-1), candidates)
        )
    return choices


def _logits(model: "PreTrainedModel", prompt: Sequence[int], written: Sequence[int]) -> Tensor:
    """Compute the LM's logits at every position of the continuation: (T, V) float32."""
    ids = torch.tensor([[*prompt, *written[:-1]]], device=model.device)
    logits: Tensor = model(ids, logits_to_keep=len(written)).logits[0, -len(written) :]
    return logits.float()


def _choice(token: int, lm: Tensor, eaps: Tensor, steered: Tensor, count: int) -> Choice:
    likeliest = torch.maximum(lm, steered).topk(min(count, len(lm))).indices.tolist()
    shown = {
        x: Candidate(x, float(lm[x]), tuple(eaps[:, x].tolist()), float(steered[x]))
        for x in {token, *likeliest}
    }
    ranked = sorted(shown.values(), key=lambda candidate: candidate.steered, reverse=True)
    return Choice(shown[token], tuple(ranked), tuple((eaps @ lm).tolist()))
