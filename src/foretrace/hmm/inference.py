"""Batched HMM inference as pure functions, in linear space with normalisation at every step.

Shapes: batch B, length T, states h, vocabulary V. A `mask` is (B, T) and True where there is a
token. Masked positions are skipped, at either end or in between.

A token whose probability given the preceding tokens is below `IMPOSSIBLE` has no posterior. Its log
probability counts as log(IMPOSSIBLE) = -69.08 nats, and the predicted belief replaces the
posterior, so that no result is NaN or infinite.
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
    """Interface of the parameters of an HMM; `HMM` implements it."""

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
    """The belief after a token, and the token's log probability.

    Attributes:
        belief: p(z_t | x up to t), (..., h).
        log_probability: log p(x_t | x before t), (...).
    """

    belief: Tensor
    log_probability: Tensor


class Filtered(NamedTuple):
    """The result of filtering, at one position, (B, ...), or at all positions, (B, T, ...).

    Attributes:
        belief: p(z_t | x up to t), (..., h).
        predicted: p(z_t+1 | x up to t), (..., h).
        log_probability: log p(x_t | x before t), (...); 0 where masked.
    """

    belief: Tensor
    predicted: Tensor
    log_probability: Tensor


class Sampled(NamedTuple):
    """Sequences drawn from an HMM, with the states that emitted them."""

    tokens: Tensor  # (B, T) ids
    states: Tensor  # (B, T)


def condition(emission: Emission, predicted: Tensor, tokens: Tensor) -> Conditioned:
    """Update the predicted state distribution with one token, by Bayes' rule.

    belief[z] is proportional to predicted[z] emission[x, z]: eq. (forward), normalised.

    Args:
        emission: Emission probabilities p(x | z).
        predicted: p(z_t | x before t), (..., h).
        tokens: Token ids x_t, (...).

    Returns:
        The belief and the log probability of the tokens.

    Example:
        >>> from foretrace.hmm import inference
        >>> predicted = hmm.initial.expand(2, -1)
        >>> inference.condition(hmm.emission, predicted, torch.tensor([3, 5])).belief.shape
        torch.Size([2, 8])
    """
    joint = predicted * emission.of_tokens(tokens)
    probability = joint.sum(-1, keepdim=True)
    bounded = probability.clamp_min(IMPOSSIBLE)
    belief = torch.where(probability > IMPOSSIBLE, joint / bounded, predicted)
    return Conditioned(belief, bounded.squeeze(-1).log())


def step(hmm: Parameters, predicted: Tensor, tokens: Tensor) -> Filtered:
    """Advance the filter by one token.

    Args:
        hmm: The HMM.
        predicted: p(z_t | x before t), (B, h); `hmm.initial` before the first token.
        tokens: Token ids x_t, (B,).

    Returns:
        The belief, the prediction for the next position and the log probability of the tokens.

    Example:
        >>> from foretrace.hmm import inference
        >>> first = inference.step(hmm, hmm.initial.expand(1, -1), torch.tensor([3]))
        >>> second = inference.step(hmm, first.predicted, torch.tensor([5]))
        >>> total = first.log_probability + second.log_probability
        >>> torch.allclose(total, hmm.log_likelihood(torch.tensor([[3, 5]])))
        True
    """
    belief, log_probability = condition(hmm.emission, predicted, tokens)
    predicted = hmm.transition.predict(belief)
    predicted = predicted / predicted.sum(-1, keepdim=True)  # half-precision products round
    return Filtered(belief, predicted, log_probability)


def scan(hmm: Parameters, tokens: Tensor, mask: Tensor | None = None) -> Iterator[Filtered]:
    """Run the filter over sequences, one position at a time, in constant memory.

    Args:
        hmm: The HMM.
        tokens: Token ids, (B, T).
        mask: True where there is a token, (B, T). None for no padding.

    Yields:
        The result at every position, (B, ...). Where masked, it repeats the position before.

    Example:
        >>> from foretrace.hmm import inference
        >>> [result.belief.shape for result in inference.scan(hmm, torch.tensor([[3, 5]]))]
        [torch.Size([1, 8]), torch.Size([1, 8])]
    """
    predicted = belief = hmm.initial.expand(len(tokens), -1)
    for position in range(tokens.shape[1]):
        advanced = step(hmm, predicted, tokens[:, position])
        if mask is not None:
            present = mask[:, position]
            present_column = present.unsqueeze(-1)
            advanced = Filtered(
                torch.where(present_column, advanced.belief, belief),
                torch.where(present_column, advanced.predicted, predicted),
                torch.where(present, advanced.log_probability, 0.0),
            )
        belief, predicted, _ = advanced
        yield advanced


def filter(hmm: Parameters, tokens: Tensor, mask: Tensor | None = None) -> Filtered:
    """Run the filter over (B, T) sequences, and return the results at all positions: (B, T, ...).

    Where masked, belief and predicted are repeated from the position before, or are `hmm.initial`
    at the start.
    """
    belief = hmm.initial.new_empty(*tokens.shape, len(hmm.initial))
    predicted = torch.empty_like(belief)
    log_probability = hmm.initial.new_empty(tokens.shape)
    for position, filtered in enumerate(scan(hmm, tokens, mask)):
        belief[:, position], predicted[:, position] = filtered.belief, filtered.predicted
        log_probability[:, position] = filtered.log_probability
    return Filtered(belief, predicted, log_probability)


def log_likelihood(hmm: Parameters, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute log p(x_1 .. x_T) of (B, T) sequences, in nats: (B,)."""
    predicted = hmm.initial.expand(len(tokens), -1)
    total = torch.zeros(len(tokens), dtype=torch.float64, device=tokens.device)
    before_last = slice(0, tokens.shape[1] - 1)
    earlier_mask = None if mask is None else mask[:, before_last]
    for filtered in scan(hmm, tokens[:, before_last], earlier_mask):
        total += filtered.log_probability
        predicted = filtered.predicted
    last = condition(hmm.emission, predicted, tokens[:, -1]).log_probability  # without a transition
    total += last if mask is None else torch.where(mask[:, -1], last, 0.0)
    return total.to(predicted.dtype)


def smooth(hmm: Parameters, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute the state posteriors p(z_t | x_1 .. x_T) of (B, T) sequences: (B, T, h); 0 if masked.

    Backward from the filter: p(z_t | all) = belief[z_t] sum_z' transition[z_t, z'] ratio[z'], with
    ratio = p(z' | all) / p(z' | x up to t). Every factor is a distribution or a quotient of two, so
    long sequences do not underflow. States whose belief underflows are dropped. If later tokens
    support only dropped states, the posterior is the filter's belief.
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
            present = mask[:, position].unsqueeze(-1)
            posterior[:, position] = torch.where(present, current, 0.0)
            ratio = torch.where(present, quotient, ratio)
    return posterior


def sample(
    hmm: Parameters, count: int, length: int, generator: torch.Generator | None = None
) -> Sampled:
    """Draw `count` sequences of `length` tokens, and the states that emitted them."""
    width = max(1, CHUNK_ELEMENTS // len(hmm.initial))  # sequences per chunk
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
        # A one-hot belief selects a row of the transition with the operator's product.
        predicted = hmm.transition.predict(torch.zeros_like(predicted).scatter(1, state, 1.0))
    return torch.cat(path, dim=1)
