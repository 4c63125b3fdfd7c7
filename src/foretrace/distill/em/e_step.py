"""The E-step: expected counts of a batch, at the cost of three matrix products per position.

The products are of (n, h) by (h, h): one moves the belief forward, one carries the evidence back,
one counts transitions. Everything else is a few passes over (n, h) numbers, in buffers that are
allocated once.
"""

from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from foretrace.hmm.inference import IMPOSSIBLE
from foretrace.hmm.probability import chunks

BUFFER_ELEMENTS = 1 << 27  # beliefs kept for the backward pass: 512 MB of float32
STRETCH = 4  # positions whose pairs of states are counted in one product
CEILING = 1e30  # evidence for unreachable states grows without bound: keep it finite


class Workspace:
    """Named buffers that batches reuse, because allocating fresh pages costs time."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._buffers: dict[str, Tensor] = {}

    def buffer(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return an uninitialised tensor; it overwrites the last one of the same name."""
        size = prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = self._like.new_empty(size, dtype=dtype)
        return buffer[:size].view(shape)


@dataclass(frozen=True)
class BatchParameters:
    """The parameters of an HMM, with emission rows only for the tokens that occur in a batch."""

    initial: Tensor  # (h,)
    transition: Tensor  # (h, h)
    rows: Tensor  # (U, h): p(x | z) of the U distinct tokens of the batch

    def to(self, dtype: torch.dtype) -> Self:
        """Convert all three to the dtype that products run in."""
        return type(self)(self.initial.to(dtype), self.transition.to(dtype), self.rows.to(dtype))


class BatchCounts(NamedTuple):
    """Expected counts of a batch: views of one flat buffer, so that one all-reduce sums them."""

    flat: Tensor
    initial: Tensor  # (h,)
    transition: Tensor  # (h, h)
    rows: Tensor  # (U, h)
    summary: Tensor  # (3,): log-likelihood in nats, possible sequences, tokens

    @classmethod
    def zeros(cls, tokens: int, states: int, workspace: Workspace) -> Self:
        """Return zero counts for `tokens` distinct tokens; they overwrite the workspace's last."""
        sizes = [states, states * states, tokens * states, 3]
        flat = workspace.buffer("counts", sum(sizes)).zero_()
        initial, transition, rows, summary = torch.split(flat, sizes)
        return cls(
            flat, initial, transition.view(states, states), rows.view(tokens, states), summary
        )


class EStep:
    """The E-step with its buffers: created once, used for every batch.

    Sums have the dtype of `like`, the counts. Products run in `dtype`, or in the dtype of the sums
    if that is narrower. A batch larger than the buffers is processed in slices.
    """

    def __init__(self, states: int, length: int, dtype: torch.dtype, like: Tensor) -> None:
        self.dtype = like.dtype if dtype.itemsize > like.dtype.itemsize else dtype
        self.slice_rows = max(1, BUFFER_ELEMENTS // (states * length))
        self.stretch = min(STRETCH, length)
        self.pair_sums = like.new_zeros(states, states)
        self._workspace = Workspace(like)

    def accumulate(self, parameters: BatchParameters, index: Tensor, counts: BatchCounts) -> None:
        """Add the expected counts of (n, T) sequences to `counts`; `index` points into `rows`.

        A sequence that is impossible under the HMM adds nothing. Its log-likelihood is
        log(IMPOSSIBLE) per token from the first impossible token on.
        """
        narrow = parameters.to(self.dtype)
        self.pair_sums.zero_()
        for index_slice in torch.split(index, self.slice_rows):
            tokens = index_slice.T.contiguous()  # (T, n)
            self._forward(narrow, tokens, counts)
            self._backward(narrow, tokens, counts)
        # The pair sums lack the factor p(z' | z), which all sequences share.
        counts.transition.addcmul_(self.pair_sums, parameters.transition)

    def _buffer(self, name: str, *shape: int) -> Tensor:
        return self._workspace.buffer(name, *shape, dtype=self.dtype)

    def _forward(self, parameters: BatchParameters, tokens: Tensor, counts: BatchCounts) -> None:
        """Compute the beliefs p(z_t | x up to t), and 1 / p(x_t | x before t)."""
        length, count = tokens.shape
        states = len(parameters.initial)
        beliefs = self._buffer("beliefs", length, count, states)
        weights = self._buffer("weights", length, count, 1)
        predicted = self._buffer("predicted", count, states)
        evidence = self._buffer("evidences", self.stretch, count, states)[0]
        predicted.copy_(parameters.initial.expand_as(predicted))
        for position, belief in enumerate(beliefs):
            if position:
                torch.mm(beliefs[position - 1], parameters.transition, out=predicted)
            torch.index_select(parameters.rows, 0, tokens[position], out=evidence)
            torch.mul(predicted, evidence, out=belief)
            # The sum accumulates in float32 in any case; an explicit dtype would copy the belief.
            probability = belief.sum(-1, keepdim=True).to(counts.summary.dtype)
            possible = probability > IMPOSSIBLE
            weights[position] = torch.where(possible, probability.reciprocal(), 0.0)
            belief.mul_(weights[position])
            counts.summary[0] += probability.clamp_min(IMPOSSIBLE).log().sum()
        counts.summary[1] += (weights[-1] > 0).sum()

    def _backward(self, parameters: BatchParameters, tokens: Tensor, counts: BatchCounts) -> None:
        """Carry evidence back, and turn the beliefs in place into p(z_t | the whole sequence).

        A message is p(later tokens | z_t) / p(later tokens | x up to t). Pairs of states are
        counted for a stretch of positions at a time, in one longer product.
        """
        length, count = tokens.shape
        states = len(parameters.initial)
        beliefs = self._buffer("beliefs", length, count, states)
        weights = self._buffer("weights", length, count, 1)
        evidences = self._buffer("evidences", self.stretch, count, states)
        messages = self._buffer("messages", self.stretch, count, states)
        message = messages[0].fill_(1.0)
        for position in reversed(range(1, length)):
            offset = (position - 1) % self.stretch
            evidence = evidences[offset]
            torch.index_select(parameters.rows, 0, tokens[position], out=evidence)
            evidence.mul_(message).mul_(weights[position]).clamp_(max=CEILING)
            message = torch.mm(evidence, parameters.transition.T, out=messages[offset])
            if offset == 0:
                before = beliefs[position - 1 : min(position - 1 + self.stretch, length - 1)]
                self._count_pairs(before, evidences[: len(before)])
                before.mul_(messages[: len(before)])
        counts.initial.add_(beliefs[0].sum(0))
        _count_tokens(beliefs, tokens, counts.rows)

    def _count_pairs(self, before: Tensor, evidence: Tensor) -> None:
        """Sum belief[z] evidence[z'] over the (k, n) positions where z' follows z."""
        left, right = before.flatten(0, 1).T, evidence.flatten(0, 1)
        if left.dtype == self.pair_sums.dtype:
            torch.addmm(self.pair_sums, left, right, out=self.pair_sums)
        else:  # products in half precision, sums over stretches in full precision
            pairs = self._buffer("pairs", *self.pair_sums.shape)
            self.pair_sums.add_(torch.mm(left, right, out=pairs))


def _count_tokens(posteriors: Tensor, tokens: Tensor, rows: Tensor) -> None:
    """Add the (T, n, h) posteriors of the positions of each token to the token's row."""
    flat_posteriors, flat_tokens = posteriors.flatten(0, 1), tokens.flatten()
    order = flat_tokens.argsort()
    count = torch.bincount(flat_tokens, minlength=len(rows))
    starts = count.cumsum(0) - count
    for ids, row_chunk in chunks(rows):  # summing all rows at once would need a third such table
        first, last = starts[ids][0], starts[ids][-1] + count[ids][-1]
        row_chunk += embedding_bag(
            order[first:last], flat_posteriors, starts[ids] - first, mode="sum"
        )


def log_likelihood(parameters: BatchParameters, index: Tensor) -> Tensor:
    """Compute log p of (n, T) sequences by the forward pass alone: (n,), in nats."""
    slice_rows = max(1, BUFFER_ELEMENTS // (4 * len(parameters.initial)))  # four (n, h) buffers
    slices = torch.split(index, slice_rows)
    return torch.cat([_log_likelihood(parameters, index_slice) for index_slice in slices])


def _log_likelihood(parameters: BatchParameters, index: Tensor) -> Tensor:
    predicted = parameters.initial.expand(len(index), -1)
    total = torch.zeros(len(index), dtype=torch.float64, device=index.device)
    for position in range(index.shape[1]):
        joint = predicted * parameters.rows[index[:, position]]
        probability = joint.sum(-1, keepdim=True)
        bounded = probability.clamp_min(IMPOSSIBLE)
        total += bounded[:, 0].log()
        if position + 1 < index.shape[1]:  # an impossible token is skipped, as in HMM
            belief = torch.where(probability > IMPOSSIBLE, joint / bounded, predicted)
            predicted = belief @ parameters.transition
    return total
