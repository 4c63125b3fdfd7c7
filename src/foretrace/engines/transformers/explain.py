"""Why each token: what the LM says of it, what the future says, and what both together say."""

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
    """A token that might come next."""

    token: int
    lm: float
    """Its probability under the language model."""
    eap: tuple[float, ...]
    """The expected probability of each goal's attribute if it comes: eq. (EAP)."""
    steered: float
    """Its probability once the goals have their say."""


@dataclass(frozen=True)
class Choice:
    """A place in a text: what was written there, and what else might have been."""

    written: Candidate
    candidates: tuple[Candidate, ...]
    """The likeliest, bare or steered, and what was written; by steered probability."""
    expected: tuple[float, ...]
    """Of each goal, the EAP before this token: its mean over what the LM might write here."""


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
    """Account for every token that was written after the prompt, steered or not.

    `max_new_tokens` is what the text might have been at most; no more than it is, if not given.
    `ends` are the tokens that end a text, beside the HMM's.
    """
    if not prompt or not written or not goals:
        raise InvalidInputError(
            "To explain a text, give a prompt, what was written after it, and one goal or more."
        )
    limit = max(len(written), max_new_tokens or 0)
    # With strength 1, the factor of a goal is its EAP: a row for each of them, beside the steered.
    requests = [
        Request(tuple(own), tuple(prompt), limit, ends=tuple(ends))
        for own in (goals, *([Goal(goal.lookahead)] for goal in goals))
    ]
    steering = PrefixTracker(goals[0].lookahead.hmm, absolute=True)
    choices = []
    for place, logits in enumerate(_logits(model, prompt, written)):
        steering.step(requests, [written[:place]] * len(requests))
        rows = torch.zeros(len(requests), len(logits), device=logits.device)
        rows[0] = logits
        steered, *log_eaps = steering.reweight(rows)
        eaps = torch.stack(log_eaps).exp()  # (goals, V)
        choices.append(
            _choice(written[place], logits.softmax(-1), eaps, steered.softmax(-1), candidates)
        )
    return choices


def _logits(model: "PreTrainedModel", prompt: Sequence[int], written: Sequence[int]) -> Tensor:
    """Read all at once what the LM says of each token written: (T, V) float32."""
    ids = torch.tensor([[*prompt, *written[:-1]]], device=model.device)
    found: Tensor = model(ids, logits_to_keep=len(written)).logits[0, -len(written) :]
    return found.float()


def _choice(token: int, lm: Tensor, eaps: Tensor, steered: Tensor, count: int) -> Choice:
    likeliest = torch.maximum(lm, steered).topk(min(count, len(lm))).indices.tolist()
    shown = {
        each: Candidate(each, float(lm[each]), tuple(eaps[:, each].tolist()), float(steered[each]))
        for each in {token, *likeliest}
    }
    ranked = sorted(shown.values(), key=lambda each: each.steered, reverse=True)
    return Choice(shown[token], tuple(ranked), tuple((eaps @ lm).tolist()))
