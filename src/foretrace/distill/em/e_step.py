"""The E-step: expected counts of a batch, at the speed of the three matrix products it needs.

A token position costs three products of (n, h) by (h, h): one to move the belief forward, one to
carry the evidence back, one to count transitions. Everything else is a few passes over (n, h)
numbers, in buffers that are allocated once.
"""

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from foretrace.distill.em.workspace import Workspace
from foretrace.hmm.inference import IMPOSSIBLE
from foretrace.hmm.probability import chunks

BUFFER_ELEMENTS = 1 << 27  # beliefs kept for the backward pass: 512 MB of float32
STRETCH = 4  # positions whose pairs of states are counted in one product
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
    summary: Tensor  # (3,): log-likelihood in nats, sequences that were possible, tokens

    @classmethod
    def zeros(cls, tokens: int, states: int, workspace: Workspace) -> Self:
        """Make empty counts for `tokens` distinct tokens, in the place of any made before."""
        sizes = [states, states * states, tokens * states, 3]
        flat = workspace.room("counts", sum(sizes)).zero_()
        initial, transition, rows, summary = torch.split(flat, sizes)
        return cls(
            flat, initial, transition.view(states, states), rows.view(tokens, states), summary
        )


class Expectation:
    """The E-step, with its working memory: made once, used for every batch.

    Sums are held in the dtype of `like`, the counts. Products run in `dtype`, but never in a wider
    one than the sums. Batches larger than the memory are taken in parts.
    """

    def __init__(self, states: int, length: int, dtype: torch.dtype, like: Tensor) -> None:
        self.dtype = like.dtype if dtype.itemsize > like.dtype.itemsize else dtype
        self.width = max(1, BUFFER_ELEMENTS // (states * length))  # sequences at once
        self.stretch = min(STRETCH, length)
        self.moved = like.new_zeros(states, states)
        self._workspace = Workspace(like)

    def add(self, parameters: BatchParameters, index: Tensor, counts: BatchCounts) -> None:
        """Add to `counts` what (n, T) sequences are expected to do; `index` points into `rows`.

        A sequence that the HMM holds impossible counts for nothing; its log-likelihood is
        log(IMPOSSIBLE) a token from the impossible one on.
        """
        narrow = parameters.to(self.dtype)
        self.moved.zero_()
        for part in torch.split(index, self.width):
            tokens = part.T.contiguous()  # (T, n)
            self._forward(narrow, tokens, counts)
            self._backward(narrow, tokens, counts)
        # Transitions were counted without their own probability, which all sequences share.
        counts.transition.addcmul_(self.moved, parameters.transition)

    def _room(self, name: str, *shape: int) -> Tensor:
        return self._workspace.room(name, *shape, dtype=self.dtype)

    def _forward(self, parameters: BatchParameters, tokens: Tensor, counts: BatchCounts) -> None:
        """Fill in the beliefs p(z_t | x up to t), and 1 / p(x_t | x before t)."""
        length, count = tokens.shape
        states = len(parameters.initial)
        beliefs = self._room("beliefs", length, count, states)
        weights = self._room("weights", length, count, 1)
        predicted = self._room("predicted", count, states)
        evidence = self._room("evidences", self.stretch, count, states)[0]
        predicted.copy_(parameters.initial.expand_as(predicted))
        for position, belief in enumerate(beliefs):
            if position:
                torch.mm(beliefs[position - 1], parameters.transition, out=predicted)
            torch.index_select(parameters.rows, 0, tokens[position], out=evidence)
            torch.mul(predicted, evidence, out=belief)
            # The sum runs in float32 in any case; asking for it would copy the belief first.
            probability = belief.sum(-1, keepdim=True).to(counts.summary.dtype)
            possible = probability > IMPOSSIBLE
            weights[position] = torch.where(possible, probability.reciprocal(), 0.0)
            belief.mul_(weights[position])
            counts.summary[0] += probability.clamp_min(IMPOSSIBLE).log().sum()
        counts.summary[1] += (weights[-1] > 0).sum()

    def _backward(self, parameters: BatchParameters, tokens: Tensor, counts: BatchCounts) -> None:
        """Carry evidence back, and turn the beliefs, in place, into p(z_t | the whole sequence).

        A message is p(later tokens | z_t) / p(later tokens | x up to t). Pairs of states are
        counted a stretch of positions at a time, in one longer product.
        """
        length, count = tokens.shape
        states = len(parameters.initial)
        beliefs = self._room("beliefs", length, count, states)
        weights = self._room("weights", length, count, 1)
        evidences = self._room("evidences", self.stretch, count, states)
        messages = self._room("messages", self.stretch, count, states)
        message = messages[0].fill_(1.0)
        for position in reversed(range(1, length)):
            place = (position - 1) % self.stretch
            evidence = evidences[place]
            torch.index_select(parameters.rows, 0, tokens[position], out=evidence)
            evidence.mul_(message).mul_(weights[position]).clamp_(max=CEILING)
            message = torch.mm(evidence, parameters.transition.T, out=messages[place])
            if place == 0:
                before = beliefs[position - 1 : min(position - 1 + self.stretch, length - 1)]
                self._count_pairs(before, evidences[: len(before)])
                before.mul_(messages[: len(before)])
        counts.initial.add_(beliefs[0].sum(0))
        _count_tokens(beliefs, tokens, counts.rows)

    def _count_pairs(self, before: Tensor, evidence: Tensor) -> None:
        """Add up belief[z] evidence[z'] over the (k, n) places where z' follows z."""
        left, right = before.flatten(0, 1).T, evidence.flatten(0, 1)
        if left.dtype == self.moved.dtype:
            torch.addmm(self.moved, left, right, out=self.moved)
        else:  # the product in half precision, the sum over stretches in full
            pairs = self._room("pairs", *self.moved.shape)
            self.moved.add_(torch.mm(left, right, out=pairs))


def _count_tokens(posteriors: Tensor, tokens: Tensor, rows: Tensor) -> None:
    """Add to each token's row the (T, n, h) posteriors of the places where it stands."""
    places, flat = posteriors.flatten(0, 1), tokens.flatten()
    order = flat.argsort()
    count = torch.bincount(flat, minlength=len(rows))
    starts = count.cumsum(0) - count
    for some, into in chunks(rows):  # a table of all sums at once would be a third of its kind
        first, last = starts[some][0], starts[some][-1] + count[some][-1]
        into += embedding_bag(order[first:last], places, starts[some] - first, mode="sum")


def log_likelihood(parameters: BatchParameters, index: Tensor) -> Tensor:
    """Give log p of (n, T) sequences, (n,) in nats: the forward half alone."""
    width = max(1, BUFFER_ELEMENTS // (4 * len(parameters.initial)))  # four buffers of a position
    parts = [_log_likelihood(parameters, part) for part in torch.split(index, width)]
    return torch.cat(parts)


def _log_likelihood(parameters: BatchParameters, index: Tensor) -> Tensor:
    predicted = parameters.initial.expand(len(index), -1)
    total = torch.zeros(len(index), dtype=torch.float64, device=index.device)
    for position in range(index.shape[1]):
        joint = predicted * parameters.rows[index[:, position]]
        probability = joint.sum(-1, keepdim=True)
        bounded = probability.clamp_min(IMPOSSIBLE)
        total += bounded[:, 0].log()
        if position + 1 < index.shape[1]:  # an impossible token is passed over, as by HMM
            belief = torch.where(probability > IMPOSSIBLE, joint / bounded, predicted)
            predicted = belief @ parameters.transition
    return total
