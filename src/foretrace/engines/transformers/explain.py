"""Explanations of generated tokens: LM probability, EAP, steered probability, and price."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foretrace.engines.prefix_tracker import PrefixTracker
from foretrace.errors import InvalidInputError
from foretrace.hmm import inference
from foretrace.lookahead import Lookahead
from foretrace.steering import CompiledGoal, Compiler, Goal, Request
from foretrace.steering.goal import IDENTITY
from foretrace.steering.state import predict_after

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


@torch.inference_mode()
def explain(
    model: "PreTrainedModel",
    prompt: Sequence[int],
    written: Sequence[int],
    goals: Sequence[Goal],
    compiler: Compiler,
    *,
    max_new_tokens: int | None = None,
    stop_ids: Sequence[int] = (),
    candidates: int = 5,
) -> list[Choice]:
    """Explain every token of a continuation, whether it was steered or not.

    Args:
        model: A causal LM of transformers.
        prompt: Token ids of the prompt.
        written: Token ids of the continuation.
        goals: One goal or more. Several goals without a transform are one product. Each has an EAP
            of its own: of its attribute to the power of its strength.
        compiler: Compiles the goals.
        max_new_tokens: Tokens that the continuation could have had at most; by default, its length.
        stop_ids: Tokens that end a text, in addition to the HMM's.
        candidates: How many of the most probable tokens to list at each position.

    Returns:
        One `Choice` for each token of the continuation.

    Raises:
        InvalidInputError: There is no prompt, no continuation or no goal.

    Example:
        >>> from foretrace.engines.transformers.explain import explain
        >>> goal, compiler = ft.Goal(attribute, strength=2.0), ft.Compiler(hmm, horizon=8)
        >>> choices = explain(model, [5, 6], [7, 8, 9], [goal], compiler, candidates=3)
        >>> [choice.written.token for choice in choices]
        [7, 8, 9]
    """
    if not prompt or not written or not goals:
        raise InvalidInputError(
            "Explaining needs a prompt, a continuation and at least one goal. One of them is empty."
        )
    limit = max(len(written), max_new_tokens or 0)
    request = Request(compiler.compile(goals), tuple(prompt), limit, None, tuple(stop_ids))
    alone = [
        _log_eaps(compiler.compile(goal), prompt, written, limit)
        for goal in map(_without_transform, goals)
    ]
    tracker = PrefixTracker(compiler.hmm)
    choices = []
    for position, logits in enumerate(_logits(model, prompt, written)):
        tracker.step([request], [written[:position]])
        steered = logits[None].clone()
        prices = tracker.reweight_(steered, measure=True)
        lm = logits.softmax(-1)
        eaps = torch.stack(
            [_relative(goal, next(eap).to(lm), lm) for goal, eap in zip(goals, alone, strict=True)]
        )
        choice = _choice(written[position], lm, eaps, steered[0].softmax(-1), candidates)
        choices.append(replace(choice, price=0.0 if prices is None else float(prices.nats[0])))
    return choices


def _without_transform(goal: Goal) -> Goal:
    """Return a goal whose factor is the EAP itself. A goal with a transform has strength 1."""
    if goal.transform.is_identity:
        return goal
    return replace(goal, strength=goal.strength or 1.0, transform=IDENTITY)


def _log_eaps(
    goal: CompiledGoal, prompt: Sequence[int], written: Sequence[int], limit: int
) -> Iterator[Tensor]:
    """Yield the log EAP of every token at each position, (V,); 0 outside the goal's window."""
    hmm, lookahead = goal.hmm, goal.factors[0].lookahead
    assert isinstance(lookahead, Lookahead)
    span = goal.window.span(prompt, written) or slice(len(written), None)
    begin, end = span.start, len(written) if span.stop is None else min(span.stop, len(written))
    outside = torch.zeros(hmm.vocab_size)
    yield from itertools.repeat(outside, begin)
    predicted = predict_after(hmm, torch.tensor([list(prompt)]), torch.tensor([len(prompt)]))
    for token in written[:begin]:
        if token < hmm.vocab_size:
            ids = torch.tensor([token], device=hmm.device)
            predicted = inference.step(hmm, predicted, ids).predicted
    length = limit if span.stop is None else min(limit, span.stop)
    yield from lookahead.log_eap_along(predicted, written[begin:end], length - begin)
    yield from itertools.repeat(outside, len(written) - end)


def _relative(goal: Goal, log_eap: Tensor, lm: Tensor) -> Tensor:
    """Return the EAP over the LM's vocabulary; for evidence, relative to its mean under the LM."""
    log_eap = torch.nn.functional.pad(log_eap, (0, len(lm) - len(log_eap)), value=-torch.inf)
    if goal.attribute.evidence:
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
