"""Explanations of generated tokens: LM probability, EAP, steered probability, parts and price."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foretrace.attribute import LogitAffine
from foretrace.engines.prefix_tracker import PrefixTracker
from foretrace.errors import InvalidInputError
from foretrace.hmm import inference
from foretrace.lookahead import Lookahead
from foretrace.lookahead.lookahead import MIN_LOG_WEIGHT
from foretrace.steering import CompiledGoal, Compiler, Goal, Request
from foretrace.steering.context import ContextIndex, ContextPool
from foretrace.steering.goal import IDENTITY, Factor
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
    word: float = 0.0
    """What the token's own weight and rewards add to its logit, in nats.

    This and the following are sums over all goals, less their mean over the LM's next tokens, and
    before the largest price of a step.
    """
    lookahead: float = 0.0
    """What the expected weights of later tokens, and required and forbidden texts, add."""
    context: float = 0.0
    """What context rewards add. It is 0 if the hidden state is not readable."""


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
    whole = compiler.compile(goals)
    request = Request(whole, tuple(prompt), limit, None, tuple(stop_ids))
    alone = [
        _log_eaps(compiler.compile(goal), prompt, written, limit)
        for goal in map(_without_transform, goals)
    ]
    parts = _LogitParts(whole, prompt, written, limit)
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
        added = parts.next(logits, lm)
        choice = _choice(written[position], lm, eaps, steered[0].softmax(-1), added, candidates)
        choices.append(replace(choice, price=0.0 if prices is None else float(prices.nats[0])))
    return choices


def _without_transform(goal: Goal) -> Goal:
    """Return a goal whose factor is the EAP itself. A goal with a transform has strength 1."""
    if goal.transform.is_identity:
        return goal
    return replace(goal, strength=goal.strength or 1.0, transform=IDENTITY)


def _lookahead(factor: Factor) -> Lookahead:
    assert isinstance(factor.lookahead, Lookahead)
    return factor.lookahead


def _log_eaps(
    goal: CompiledGoal,
    prompt: Sequence[int],
    written: Sequence[int],
    limit: int,
    lookahead: Lookahead | None = None,
    required_power: float | None = None,
) -> Iterator[Tensor]:
    """Yield the log EAP of every token at each position, (V,); 0 outside the goal's window.

    By default, the lookahead is the one of the goal's first factor. With the power, it is what
    steering uses.
    """
    hmm, lookahead = goal.hmm, lookahead or _lookahead(goal.factors[0])
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
    yield from lookahead.log_eap_along(
        predicted, written[begin:end], length - begin, required_power
    )
    yield from itertools.repeat(outside, len(written) - end)


class _LogitParts:
    """What words, the lookahead and context rewards add to logits, position by position."""

    def __init__(
        self, goal: CompiledGoal, prompt: Sequence[int], written: Sequence[int], limit: int
    ) -> None:
        self.size = goal.hmm.vocab_size
        lookaheads = [_lookahead(factor) for factor in goal.factors]
        self.transforms = [factor.transform for factor in goal.factors]
        power = goal.required_power(prompt)
        self.whole, self.words = (
            [_log_eaps(goal, prompt, written, limit, one, power) for one in of_factors]
            for of_factors in (lookaheads, map(_of_words, lookaheads))
        )
        self.pool = None if goal.probe is None else ContextPool(goal.probe, goal.hmm)
        components: list[int] = []
        for reward in (one.attribute.context for one in lookaheads):
            if reward is not None and self.pool is not None:
                first = self.pool.write(reward)
                components += range(first, first + len(reward))
        self.index = ContextIndex(None, torch.tensor([components], device=goal.hmm.device))
        positions = range(len(written))
        span = goal.window.span(prompt, written) or slice(0, 0)
        self.inside = iter([position in positions[span] for position in positions])

    def next(self, logits: Tensor, lm: Tensor) -> Tensor:
        """Return the parts of the next position: (3, V), from logits and probabilities (V,)."""
        word, whole = (
            torch.stack(
                [
                    _log_factor(next(log_eaps), transform)
                    for log_eaps, transform in zip(each, self.transforms, strict=True)
                ]
            ).sum(0)
            for each in (self.words, self.whole)
        )
        context = torch.zeros(1, self.size, device=logits.device)
        if next(self.inside) and self.pool is not None:
            self.pool.add_rewards_(context, logits[None], self.index, solve=True)
        parts = torch.stack([word, whole - word, context[0].to(whole)]).to(lm)
        parts = parts - (parts @ lm[: self.size] / lm[: self.size].sum())[:, None]
        return torch.nn.functional.pad(parts, (0, len(lm) - self.size))


def _of_words(lookahead: Lookahead) -> Lookahead:
    """Return the lookahead for no later token, without required and forbidden texts."""
    attribute = lookahead.attribute
    if attribute.terms.is_product:
        attribute = replace(attribute, terms=replace(attribute.terms, automaton=None))
    return Lookahead(lookahead.hmm, attribute, 0)


def _log_factor(log_eap: Tensor, transform: LogitAffine) -> Tensor:
    if not transform.is_identity:
        log_eap = transform(log_eap.exp()).log()
    return log_eap.clamp_min(MIN_LOG_WEIGHT)


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


def _choice(
    token: int, lm: Tensor, eaps: Tensor, steered: Tensor, parts: Tensor, count: int
) -> Choice:
    likeliest = torch.maximum(lm, steered).topk(min(count, len(lm))).indices.tolist()
    shown = {
        x: Candidate(
            x, float(lm[x]), tuple(eaps[:, x].tolist()), float(steered[x]), *parts[:, x].tolist()
        )
        for x in {token, *likeliest}
    }
    ranked = sorted(shown.values(), key=lambda candidate: candidate.steered, reverse=True)
    return Choice(shown[token], tuple(ranked), tuple((eaps @ lm).tolist()))
