"""Inference as pure functions: linear space, normalised at every step, batched, maskable.

Shapes: batch B, length T, states h, vocabulary V. A `mask` is (B, T), True where there is a token;
positions without one are passed over as if they were not there, at either end or in between.

An impossible token, one with probability below `IMPOSSIBLE` given what came before, has no
posterior. It counts as log(IMPOSSIBLE) = -69.08 nats, and the belief stays as it was predicted:
the filter carries on, and nothing becomes NaN or infinite.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from foretrace.hmm.emission import Emission
from foretrace.hmm.probability import CHUNK_ELEMENTS
from foretrace.hmm.transition import Transition

IMPOSSIBLE = 1e-30


class Parameters(Protocol):
    """The three parts of an HMM."""

    @property
    def initial(self) -> Tensor:
        """p(z_1): (h,)."""

    @property
    def transition(self) -> Transition:
        """p(z' | z)."""

    @property
    def emission(self) -> Emission:
        """p(x | z)."""


class Conditioned(NamedTuple):
    """The state after a token, and how likely the token was."""

    belief: Tensor  # (..., h): p(z_t | x up to t)
    log_probability: Tensor  # (...): log p(x_t | x before t)


class Filtered(NamedTuple):
    """The filter at one position, (B, ...), or along whole sequences, (B, T, ...)."""

    belief: Tensor  # (..., h): p(z_t | x up to t)
    predicted: Tensor  # (..., h): p(z_t+1 | x up to t)
    log_probability: Tensor  # (...): log p(x_t | x before t); 0 where masked


class Sampled(NamedTuple):
    """Sequences drawn from an HMM, with the states that emitted them."""

    tokens: Tensor  # (B, T)
    states: Tensor  # (B, T)


def condition(emission: Emission, predicted: Tensor, tokens: Tensor) -> Conditioned:
    """Take one token into account, by Bayes' rule: (..., h) predicted, (...) ids.

    belief[z] is proportional to predicted[z] emission[x, z]: eq. (forward), normalised.
    """
    joint = predicted * emission.rows(tokens)
    probability = joint.sum(-1)
    bounded = probability.clamp_min(IMPOSSIBLE)
    possible = (probability > IMPOSSIBLE).unsqueeze(-1)
    belief = torch.where(possible, joint / bounded.unsqueeze(-1), predicted)
    return Conditioned(belief, bounded.log())


def step(hmm: Parameters, predicted: Tensor, tokens: Tensor) -> Filtered:
    """Advance the filter by one token: (B, h) predicted, (B,) ids."""
    belief, log_probability = condition(hmm.emission, predicted, tokens)
    predicted = hmm.transition.predict(belief)
    predicted = predicted / predicted.sum(-1, keepdim=True)  # products in half precision round
    return Filtered(belief, predicted, log_probability)


def scan(hmm: Parameters, tokens: Tensor, mask: Tensor | None = None) -> Iterator[Filtered]:
    """Run the filter along (B, T) tokens, one position at a time, in constant memory."""
    predicted = belief = hmm.initial.expand(len(tokens), -1)
    for position in range(tokens.shape[1]):
        advanced = step(hmm, predicted, tokens[:, position])
        if mask is not None:
            seen = mask[:, position]
            kept = seen.unsqueeze(-1)
            advanced = Filtered(
                torch.where(kept, advanced.belief, belief),
                torch.where(kept, advanced.predicted, predicted),
                torch.where(seen, advanced.log_probability, 0.0),
            )
        belief, predicted, _ = advanced
        yield advanced


def filter(hmm: Parameters, tokens: Tensor, mask: Tensor | None = None) -> Filtered:
    """Run the filter along (B, T) tokens and keep every position: fields (B, T, ...).

    Where masked, belief and predicted are those of the position before, at the start `initial`.
    """
    whole = hmm.initial.new_empty(2, *tokens.shape, len(hmm.initial))
    log_probability = hmm.initial.new_empty(tokens.shape)
    for position, filtered in enumerate(scan(hmm, tokens, mask)):
        whole[0, :, position], whole[1, :, position] = filtered.belief, filtered.predicted
        log_probability[:, position] = filtered.log_probability
    return Filtered(whole[0], whole[1], log_probability)


def log_likelihood(hmm: Parameters, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """Give log p(x_1 .. x_T) of every row: (B, T) ids -> (B,)."""
    predicted = hmm.initial.expand(len(tokens), -1)
    total = torch.zeros(len(tokens), dtype=torch.float64, device=tokens.device)
    before_last = slice(0, tokens.shape[1] - 1)
    earlier_mask = None if mask is None else mask[:, before_last]
    for filtered in scan(hmm, tokens[:, before_last], earlier_mask):
        total += filtered.log_probability
        predicted = filtered.predicted
    last = condition(hmm.emission, predicted, tokens[:, -1]).log_probability  # no step after it
    total += last if mask is None else torch.where(mask[:, -1], last, 0.0)
    return total.to(predicted.dtype)


def smooth(hmm: Parameters, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """Give the posteriors p(z_t | x_1 .. x_T): (B, T) ids -> (B, T, h), 0 where masked.

    Backward from the filter: p(z_t | all) = belief[z_t] sum_z' transition[z_t, z'] ratio[z'], with
    ratio = p(z' | all) / p(z' | x up to t). Every factor is a distribution or a quotient of two, so
    that the length of the text does not matter. A state whose belief has fallen below the smallest
    number of the dtype is forgotten; if all the later evidence is for such states, the filter's own
    belief is the answer.
    """
    filtered = filter(hmm, tokens, mask)
    posterior = torch.zeros_like(filtered.belief)
    ratio = torch.ones_like(filtered.belief[:, 0])
    start = hmm.initial.expand_as(ratio)
    for position in reversed(range(tokens.shape[1])):
        current = filtered.belief[:, position] * hmm.transition.expect(ratio)
        total = current.sum(-1, keepdim=True)
        current = torch.where(total > 0, current / total, filtered.belief[:, position])
        predicted = filtered.predicted[:, position - 1] if position else start
        quotient = torch.where(
            predicted > torch.finfo(predicted.dtype).tiny, current / predicted, 0
        )
        if mask is None:
            posterior[:, position], ratio = current, quotient
        else:
            kept = mask[:, position].unsqueeze(-1)
            posterior[:, position] = torch.where(kept, current, 0.0)
            ratio = torch.where(kept, quotient, ratio)
    return posterior


def sample(
    hmm: Parameters, count: int, length: int, generator: torch.Generator | None = None
) -> Sampled:
    """Draw `count` sequences of `length` tokens, and the states behind them."""
    width = max(1, CHUNK_ELEMENTS // len(hmm.initial))  # sequences at once
    blocks = [
        _sample_states(hmm, min(width, count - start), length, generator)
        for start in range(0, count, width)
    ]
    states = torch.cat(blocks)
    tokens = hmm.emission.sample(states.flatten(), generator).view_as(states)
    return Sampled(tokens, states)


def _sample_states(
    hmm: Parameters, count: int, length: int, generator: torch.Generator | None
) -> Tensor:
    predicted = hmm.initial.expand(count, -1)
    path = []
    for _ in range(length):
        state = torch.multinomial(predicted, 1, generator=generator)
        path.append(state)
        # A state that is known is a belief in it alone: no third product in the protocol.
        predicted = hmm.transition.predict(torch.zeros_like(predicted).scatter(1, state, 1.0))
    return torch.cat(path, dim=1)
