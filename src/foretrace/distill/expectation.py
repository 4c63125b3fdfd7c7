"""The E-step: expected counts of a batch, at the speed of the three matrix products it needs.

A token position costs three products of (n, h) by (h, h): one to move the belief forward, one to
carry the evidence back, one to count transitions. Everything else is a few passes over (n, h)
numbers, in buffers that are allocated once.
"""

from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Self

import torch
from torch import Tensor

from foretrace.hmm.inference import IMPOSSIBLE

BUFFER_ELEMENTS = 1 << 27  # beliefs kept for the backward pass: 512 MB of float32
STRETCH = 8  # positions whose pairs of states are counted in one product
CEILING = 1e30  # evidence for states that cannot be reached grows without bound: keep it finite


@dataclass(frozen=True)
class BatchParameters:
    """What an HMM says about one batch: only the rows of the tokens that occur in it."""

    initial: Tensor  # (h,)
    transition: Tensor  # (h, h)
    rows: Tensor  # (U, h): p(x | z) of the U distinct tokens of the batch

    def to(self, dtype: torch.dtype) -> Self:
        """Convert all three to the dtype that products run in."""
        return type(self)(self.initial.to(dtype), self.transition.to(dtype), self.rows.to(dtype))


class BatchCounts(NamedTuple):
    """Expected counts of a batch, views of one flat buffer so that one all-reduce adds them up."""

    flat: Tensor
    initial: Tensor  # (h,)
    transition: Tensor  # (h, h)
    rows: Tensor  # (U, h)
    summary: Tensor  # (2,): log-likelihood in nats, sequences

    @classmethod
    def zeros(cls, tokens: int, like: Tensor) -> Self:
        """Make empty counts for `tokens` distinct tokens, and as many states as `like` has."""
        states = len(like)
        sizes = [states, states * states, tokens * states, 2]
        flat = like.new_zeros(sum(sizes))
        initial, transition, rows, summary = torch.split(flat, sizes)
        return cls(
            flat, initial, transition.view(states, states), rows.view(tokens, states), summary
        )


class Expectation:
    """The E-step, with its working memory: made once, used for every batch.

    Products run in `dtype`, sums in the dtype of the counts. Batches larger than the memory are
    taken in parts.
    """

    def __init__(self, states: int, length: int, dtype: torch.dtype, like: Tensor) -> None:
        self.length, self.dtype = length, dtype
        self.width = max(1, BUFFER_ELEMENTS // (states * length))  # sequences at once
        self.stretch = min(STRETCH, length)
        self.moved = like.new_zeros(states, states)
        self._like = like
        self._memory: dict[str, Tensor] = {}

    def add(self, parameters: BatchParameters, index: Tensor, counts: BatchCounts) -> None:
        """Add to `counts` what (n, T) sequences are expected to do; `index` points into `rows`.

        A sequence that the HMM holds impossible counts for nothing, and for log(IMPOSSIBLE) at
        each impossible token.
        """
        narrow = parameters.to(self.dtype)
        self.moved.zero_()
        for part in torch.split(index, self.width):
            tokens = part.T.contiguous()  # (T, n)
            self._forward(narrow, tokens, counts)
            self._backward(narrow, tokens, counts)
        # Transitions were counted without their own probability, which all sequences share.
        counts.transition.addcmul_(self.moved, parameters.transition)
        counts.summary[1] += len(index)

    def _room(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Give working memory of a shape, allocated on first use: fresh pages cost time."""
        needed = prod(shape)
        held = self._memory.get(name)
        if held is None or held.numel() < needed:
            held = self._memory[name] = self._like.new_empty(needed, dtype=dtype or self.dtype)
        return held[:needed].view(shape)

    def _forward(self, parameters: BatchParameters, tokens: Tensor, counts: BatchCounts) -> None:
        """Fill in the beliefs p(z_t | x up to t), and 1 / p(x_t | x before t)."""
        length, count = tokens.shape
        states = len(parameters.initial)
        beliefs = self._room("beliefs", length, count, states)
        weights = self._room("weights", length, count, 1)
        predicted, evidence = (self._room(name, count, states) for name in ("message", "evidence"))
        predicted.copy_(parameters.initial.expand_as(predicted))
        for position, belief in enumerate(beliefs):
            if position:
                torch.mm(beliefs[position - 1], parameters.transition, out=predicted)
            torch.index_select(parameters.rows, 0, tokens[position], out=evidence)
            torch.mul(predicted, evidence, out=belief)
            probability = belief.sum(-1, keepdim=True, dtype=counts.summary.dtype)
            possible = probability > IMPOSSIBLE
            weights[position] = torch.where(possible, probability.reciprocal(), 0.0)
            belief.mul_(weights[position])
            counts.summary[0] += probability.clamp_min(IMPOSSIBLE).log().sum()

    def _backward(self, parameters: BatchParameters, tokens: Tensor, counts: BatchCounts) -> None:
        """Carry evidence back, and count: states by token, pairs of states, first states."""
        length, count = tokens.shape
        states = len(parameters.initial)
        beliefs = self._room("beliefs", length, count, states)
        weights = self._room("weights", length, count, 1)
        message = self._room("message", count, states)
        posterior = self._room("posterior", count, states, dtype=counts.rows.dtype)
        evidences = self._room("stretch", self.stretch, count, states)
        message.fill_(1.0)  # p(later tokens | z_t) / p(later tokens | x up to t)
        for position in reversed(range(length)):
            torch.mul(beliefs[position], message, out=posterior)
            counts.rows.index_add_(0, tokens[position], posterior)
            if position == 0:
                break
            # Pairs of states are counted a stretch of positions at a time: one longer product.
            place = (position - 1) % self.stretch
            evidence = evidences[place]
            torch.index_select(parameters.rows, 0, tokens[position], out=evidence)
            evidence.mul_(message).mul_(weights[position]).clamp_(max=CEILING)
            torch.mm(evidence, parameters.transition.T, out=message)
            if place == 0:
                last = min(position - 1 + self.stretch, length - 1)
                before = beliefs[position - 1 : last]
                self._count_pairs(before.flatten(0, 1), evidences[: len(before)].flatten(0, 1))
        counts.initial.add_(posterior.sum(0))

    def _count_pairs(self, before: Tensor, evidence: Tensor) -> None:
        if before.dtype == self.moved.dtype:
            torch.addmm(self.moved, before.T, evidence, out=self.moved)
        else:  # the product in half precision, the sum over stretches in full
            pairs = self._room("pairs", *self.moved.shape)
            self.moved.add_(torch.mm(before.T, evidence, out=pairs))


def log_likelihood(parameters: BatchParameters, index: Tensor) -> Tensor:
    """Give log p of (n, T) sequences, n in nats: the forward half alone."""
    predicted = parameters.initial.expand(len(index), -1)
    total = torch.zeros(len(index), dtype=torch.float64, device=index.device)
    for position in range(index.shape[1]):
        joint = predicted * parameters.rows[index[:, position]]
        probability = joint.sum(-1, keepdim=True).clamp_min(IMPOSSIBLE)
        total += probability[:, 0].log()
        if position + 1 < index.shape[1]:
            predicted = (joint / probability) @ parameters.transition
    return total
