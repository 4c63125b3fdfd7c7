"""Explanations of generated tokens: LM probability, EAP, steered probability, and price."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foretrace.errors import InvalidInputError
from foretrace.lookahead.price import prices
from foretrace.steering import Goal, PrefixTracker, Request
from foretrace.steering.merge_goals import merge_goals

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Candidate:
    """A possible next token."""

    token: int
    lm: float
    """Probability under the language model."""
    eap: tuple[float, ...]
    """EAP of each goal after this token: eq. (EAP).

    For a goal with evidence, it is the expected exponential of all rewards, divided by its mean
    over the LM's next tokens: above 1, the token is favoured. Outside a goal's window, it is 1.
    """
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
    """EAP of each goal before this token: the mean over the LM's next tokens; 1 for evidence."""
    price: float = 0.0
    """The price of steering here: KL(steered || bare) of the next token, in nats."""


class _FactorRequest(Request):
    """A request of one goal whose steps have no largest price, so that its factor is exact."""

    @property
    def max_price(self) -> float:
        """Return infinity."""
        return inf


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
        goals: One goal or more. Several goals without a transform are one product; the EAP of each
            is that of its own attribute, to the power of its strength.
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
    settings = (tuple(prompt), limit, None, tuple(ends))
    request = Request(merge_goals(goals), *settings)
    # With strength 1 a goal's factor is its EAP: one row for each goal.
    factor_requests = [_FactorRequest((_factor_goal(goal),), *settings) for goal in goals]
    hmm = goals[0].lookahead.hmm
    tracker, factor_tracker = PrefixTracker(hmm), PrefixTracker(hmm, absolute=True)
    choices = []
    for position, logits in enumerate(_logits(model, prompt, written)):
        generated = written[:position]
        tracker.step([request], [generated])
        factor_tracker.step(factor_requests, [generated] * len(goals))
        steered = tracker.reweight(logits[None])
        log_eaps = factor_tracker.reweight(logits.new_zeros(len(goals), len(logits)))
        lm = logits.softmax(-1)
        eaps = torch.stack([_eap(goal, row, lm) for goal, row in zip(goals, log_eaps, strict=True)])
        choice = _choice(written[position], lm, eaps, steered[0].softmax(-1), candidates)
        choices.append(replace(choice, price=float(prices(logits[None], steered))))
    return choices


def _factor_goal(goal: Goal) -> Goal:
    """Return the goal whose factor is the EAP of a goal's lookahead, at its strength."""
    return Goal(goal.lookahead, 1.0, neutral_end=False, after=goal.after, window=goal.window)


def _eap(goal: Goal, log_eap: Tensor, lm: Tensor) -> Tensor:
    """Return the EAP of every token; for evidence, relative to its mean under the LM: (V,)."""
    if goal.lookahead.attribute.evidence:
        log_eap = log_eap - (log_eap + lm.log()).logsumexp(-1)
    return log_eap.exp()


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
