"""Backward tables: the expected weight of r more tokens, for every r and every HMM state."""

from typing import NamedTuple

import torch
from torch import Tensor

from foretrace.attribute.terms import Terms
from foretrace.hmm import HMM

LOG_ZERO = -1e30  # stands for log 0; it is finite, so that differences are not NaN


def log_zero_for(logits: Tensor) -> float:
    """Return `LOG_ZERO` in the range of the logits' dtype: float16 cannot hold it."""
    return max(LOG_ZERO, torch.finfo(logits.dtype).min)


class Tables(NamedTuple):
    """Expected weights of the tokens to come: `values * exp(log_scales)`.

    If `stores_complement(terms)`, `values` holds 1 minus the expected weight, with scales of 1.
    """

    values: Tensor  # (horizon + 1, K, Q, h)
    log_scales: Tensor  # (horizon + 1, K, Q) float64


class Successors(NamedTuple):
    """The states that an automaton can move to from one of its states."""

    targets: Tensor  # (D,)
    weights: Tensor  # (K, D, h): expected weight of the tokens that lead there, by HMM state


def stores_complement(terms: Terms) -> bool:
    """Return whether tables hold 1 minus the expected weight.

    Terms of both signs may cancel; the complement keeps the digits of small differences. Tables
    with an automaton are rescaled instead: a constraint is improbable, and its complement near 1.
    """
    return terms.signed and terms.automaton is None


def build_tables(hmm: HMM, terms: Terms, loss: Tensor, horizon: int) -> Tables:
    """Run the backward recursion; `loss[z] = sum_x (1 - w(x)) emission[x, z]`: (K, h).

    L[0] = final; L[r, q] = transition @ (sum over q' of weight(q, q') * L[r - 1, q']), where
    weight(q, q') is the expected weight of the tokens that move the automaton from q to q'. Without
    an automaton it is 1 - loss. For the complement D = 1 - L,
    D[r, q] = transition @ (loss + sum over q' of weight(q, q') D[r - 1, q']).
    """
    successors = _successors(hmm, terms, loss)
    final_weights = (
        torch.ones(len(terms), 1) if terms.automaton is None else terms.automaton.final_weights
    )
    complement, has_automaton = stores_complement(terms), terms.automaton is not None
    first = (1 - final_weights if complement else final_weights).to(loss)
    values = loss.new_empty(horizon + 1, *first.shape, hmm.num_states)
    log_scales = values.new_zeros(values.shape[:3], dtype=torch.float64)
    values[0] = first.unsqueeze(-1)
    if has_automaton:
        _rescale_(values[0], log_scales[0])
    for remaining in range(1, horizon + 1):
        for state, (targets, weights) in enumerate(successors):
            scales = log_scales[remaining - 1][:, targets]  # (K, D)
            largest = scales.max(1, keepdim=True).values
            if len(targets) > 1:
                weights = weights * (scales - largest).exp().to(weights).unsqueeze(-1)
            expected = (weights * values[remaining - 1][:, targets]).sum(1)
            values[remaining, :, state] = expected + loss if complement else expected
            log_scales[remaining, :, state] = largest[:, 0]
        values[remaining] = hmm.transition.expect(values[remaining]).clamp_(0.0, 1.0)
        if has_automaton:
            _rescale_(values[remaining], log_scales[remaining])
    return Tables(values, log_scales)


def _rescale_(values: Tensor, log_scales: Tensor) -> None:
    """Make the largest value of every table 1: rare sequences underflow float32."""
    largest = values.amax(-1)
    values.div_(torch.where(largest > 0, largest, 1.0).unsqueeze(-1))
    log_scales.add_(largest.double().log()).clamp_min_(LOG_ZERO)


def _successors(hmm: HMM, terms: Terms, loss: Tensor) -> list[Successors]:
    """Return the successors of each automaton state; classes with one target are summed."""
    kept = 1 - loss
    if terms.automaton is None:
        return [Successors(torch.zeros(1, dtype=torch.long), kept.unsqueeze(1))]
    automaton = terms.automaton.dfa
    class_weights = kept.new_zeros(len(terms), automaton.transitions.shape[1], hmm.num_states)
    token_weights = terms.weights(automaton.tokens).to(loss)  # (K, M)
    for token_class in range(1, class_weights.shape[1]):
        mask = automaton.classes == token_class
        tokens = automaton.tokens[mask].to(hmm.device, torch.long)
        expected = hmm.emission.expect(token_weights[:, mask].contiguous(), tokens)
        class_weights[:, token_class] = expected
    class_weights[:, 0] = (kept - class_weights[:, 1:].sum(1)).clamp_min(0.0)
    successors = []
    for transitions in automaton.transitions.long():
        targets, target_index = torch.unique(transitions, return_inverse=True)
        weights = class_weights.new_zeros(len(terms), len(targets), hmm.num_states)
        weights.index_add_(1, target_index.to(weights.device), class_weights)
        successors.append(Successors(targets, weights))
    return successors
