"""Backward tables: the expected worth of all that may follow, by state and tokens left."""

from typing import NamedTuple

import torch
from torch import Tensor

from foretrace.attribute.terms import Terms
from foretrace.hmm import HMM

NEVER = -1e30  # the logarithm of what is impossible, as a number: differences of it are numbers


def never_in(logits: Tensor) -> float:
    """Give that number in the dtype of logits: float16 ends before it."""
    return max(NEVER, torch.finfo(logits.dtype).min)


class Tables(NamedTuple):
    """What the future is worth: `values` times exp(`log_scales`); or 1 minus it."""

    values: Tensor  # (horizon + 1, K, Q, h)
    log_scales: Tensor  # (horizon + 1, K, Q) float64


class Onward(NamedTuple):
    """Where an automaton goes from one of its states, and how probably."""

    targets: Tensor  # (D,)
    shares: Tensor  # (K, D, h): expected weight of the tokens that lead there, by the HMM's state


def complements(terms: Terms) -> bool:
    """Whether what is lost is kept in tables, not what remains: terms of both signs may cancel.

    With an automaton they are rescaled instead: what must occur is improbable, and 1 minus it 1.
    """
    return terms.signed and terms.memory is None


def build(hmm: HMM, terms: Terms, lost: Tensor, horizon: int) -> Tables:
    """Walk backward. Its cost grows with the tokens that have a weight, and with Q.

    L[0] = final; L[r, q] = transition @ (sum over q' of share(q, q') * L[r - 1, q']), where share
    is the expected weight of the tokens that take the automaton from q to q'; without one it is
    1 - lost, with lost[z] = sum_x (1 - w(x)) emission[x, z]: (K, h). Where D = 1 - L is kept,
    D[r, q] = transition @ (lost + sum over q' of share(q, q') D[r - 1, q']).
    """
    onward = _onward(hmm, terms, lost)
    finals = torch.ones(len(terms), 1) if terms.memory is None else terms.memory.finals
    complement, remembers = complements(terms), terms.memory is not None
    first = (1 - finals if complement else finals).to(lost)
    values = lost.new_empty(horizon + 1, *first.shape, hmm.num_states)
    log_scales = values.new_zeros(values.shape[:3], dtype=torch.float64)
    values[0] = first.unsqueeze(-1)
    if remembers:
        _rescale_(values[0], log_scales[0])
    for left in range(1, horizon + 1):
        for state, (targets, shares) in enumerate(onward):
            scales = log_scales[left - 1][:, targets]  # (K, D)
            most = scales.max(1, keepdim=True).values
            shrunk = shares if len(targets) == 1 else shares * _weights(scales - most, shares)
            kept = (shrunk * values[left - 1][:, targets]).sum(1)
            values[left, :, state] = kept + lost if complement else kept
            log_scales[left, :, state] = most[:, 0]
        values[left] = hmm.transition.expect(values[left]).clamp_(0.0, 1.0)
        if remembers:
            _rescale_(values[left], log_scales[left])
    return Tables(values, log_scales)


def _weights(log_weights: Tensor, like: Tensor) -> Tensor:
    return log_weights.exp().to(like).unsqueeze(-1)


def _rescale_(values: Tensor, log_scales: Tensor) -> None:
    """Make the largest number of every table 1: a rare text is rarer than any float32."""
    most = values.amax(-1)
    values.div_(torch.where(most > 0, most, 1.0).unsqueeze(-1))
    log_scales.add_(most.double().log()).clamp_min_(NEVER)


def _onward(hmm: HMM, terms: Terms, lost: Tensor) -> list[Onward]:
    """Find where each state leads: tokens of one class together, and classes of one target."""
    kept = 1 - lost
    if terms.memory is None:
        return [Onward(torch.zeros(1, dtype=torch.long), kept.unsqueeze(1))]
    automaton = terms.memory.automaton
    classes = kept.new_zeros(len(terms), automaton.moves.shape[1], hmm.num_states)
    weights = terms.weights(automaton.tokens).to(lost)  # (K, M)
    for each in range(1, classes.shape[1]):
        own = automaton.classes == each
        tokens = automaton.tokens[own].to(hmm.device, torch.long)
        classes[:, each] = hmm.emission.expect(weights[:, own].contiguous(), tokens)
    classes[:, 0] = (kept - classes[:, 1:].sum(1)).clamp_min(0.0)
    found = []
    for moves in automaton.moves.long():
        targets, owner = torch.unique(moves, return_inverse=True)
        shares = classes.new_zeros(len(terms), len(targets), hmm.num_states)
        found.append(Onward(targets, shares.index_add_(1, owner.to(classes.device), classes)))
    return found
