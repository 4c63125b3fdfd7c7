"""Choosing which emission entries to keep, so that no state loses more than was promised.

The promise is in nats: for every state z, KL(p(. | z), sparse(. | z)) <= tolerance. By the chain
rule, text drawn from the HMM loses on average at most `tolerance` nats of log-likelihood per token;
by Pinsker, what a state says moves by at most sqrt(tolerance / 2) in total variation.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from foretrace.errors import InvalidInputError
from foretrace.hmm.emission import DenseEmission
from foretrace.hmm.probability import CHUNK_ELEMENTS
from foretrace.hmm.sparse import SparseEmission

LEVELS = 256
FIRST_TARGET = 0.1
LEVELS_PER_OCTAVE = 4  # level l holds probabilities about 2**(-l / 4); the last, all below


@dataclass(frozen=True)
class Sparsification:
    """What sparsifying cost: the worst state's loss, measured, and what is left."""

    tolerance: float
    nats_per_token: float
    """Largest KL(dense, sparse) of a state's emission."""
    total_variation: float
    """Largest distance between a state's dense and sparse emission."""
    density: float


class _Cut(NamedTuple):
    """How deep each state is cut, and what that means: tables are (LEVELS + 1, h), by depth."""

    depth: Tensor  # (h,)
    background: Tensor  # (V,)
    leaks: Tensor

    @property
    def leak(self) -> Tensor:
        """What each state leaks at its depth: (h,)."""
        return self.leaks.gather(0, self.depth[None])[0]


def sparsify(dense: DenseEmission, tolerance: float) -> tuple[SparseEmission, Sparsification]:
    """Keep the largest entries of each state, as few as lose at most `tolerance` nats per token."""
    if not 1e-6 <= tolerance <= 1:
        raise InvalidInputError(
            f"tolerance is {tolerance}, but must lie between 1e-6 and 1: it is the loss of "
            f"log-likelihood, in nats per token, that you accept. 1e-3 is a good start."
        )
    cut, retreat = _deepest_cut(dense, tolerance), 1
    while True:
        sparse = _assemble(dense, cut)
        nats, moved = _measure(dense, sparse)
        broken = ~(nats <= tolerance) & (cut.depth < LEVELS)  # at LEVELS, nothing is left out
        if not bool(broken.any()):
            break
        # Where the background says more of a kept entry than the table does, the loss is larger
        # than foreseen: those states keep more.
        depth = torch.where(broken, (cut.depth + retreat).clamp(max=LEVELS), cut.depth)
        cut, retreat = cut._replace(depth=depth), 2 * retreat
    density = sparse.values.numel() / (sparse.num_states * sparse.vocab_size)
    worst = max(0.0, float(nats.max())), float(moved.max())
    return sparse, Sparsification(tolerance, *worst, density)


def _deepest_cut(dense: DenseEmission, target: float) -> _Cut:
    """Cut every state as deep as the target allows, against the background that suits the cut.

    Each depends on the other: the background is what the cut leaves out. The first cuts leave out
    too much, so that the background sees all of the floor that smoothing gave the table; then the
    target tightens, and both settle.
    """
    (mass,) = _tails(dense, lambda tokens, p: [p])
    depth = _deepest(mass <= FIRST_TARGET)
    for current in _tightening(target):
        background = _left_out(dense, depth)
        share, surprise = _tails(dense, partial(_shares, background))
        leaks = torch.where(mass > 0, mass / share, 0.0)
        loss = surprise - torch.xlogy(mass, leaks)
        depth = _deepest((loss <= current) & (leaks <= 1))
    return _Cut(depth, background, leaks)


def _tightening(target: float) -> list[float]:
    """List the targets of the rounds: from loose to the one that counts, that one three times."""
    rounds = [FIRST_TARGET]
    while rounds[-1] > target:
        rounds.append(max(target, rounds[-1] / 10))
    return [max(target, current) for current in rounds] + [target, target]


def _shares(background: Tensor, tokens: Tensor, p: Tensor) -> list[Tensor]:
    """Give of every entry the background's share and the surprise against the background."""
    q = background[tokens, None]
    return [q.expand_as(p), _surprise(p, q)]


def _surprise(p: Tensor, q: Tensor) -> Tensor:
    """Give p log(p / q), 0 where p is 0."""
    return torch.xlogy(p, p) - torch.xlogy(p, q)


def _walk(dense: DenseEmission) -> Iterator[tuple[Tensor, Tensor]]:
    """Walk over the vocabulary in chunks: (n,) token ids and their (n, h) probabilities."""
    step = max(1, CHUNK_ELEMENTS // dense.num_states)
    for tokens in torch.split(torch.arange(dense.vocab_size, device=dense.table.device), step):
        yield tokens, dense.rows(tokens)


def _level(p: Tensor) -> Tensor:
    """Sort probabilities into levels, the largest in level 0."""
    return p.log2().mul_(-LEVELS_PER_OCTAVE).clamp_(0, LEVELS - 1).long()


def _tails(
    dense: DenseEmission, quantities: Callable[[Tensor, Tensor], list[Tensor]]
) -> list[Tensor]:
    """Sum quantities of (tokens, probabilities) over the entries at or below each level.

    Each is (LEVELS + 1, h): row l is what a cut at level l leaves out; the last row is nothing.
    """
    sums: list[Tensor] = []
    for tokens, p in _walk(dense):
        level, found = _level(p), quantities(tokens, p)
        sums = sums or [
            torch.zeros(LEVELS + 1, p.shape[1], dtype=torch.float64, device=p.device) for _ in found
        ]
        for total, quantity in zip(sums, found, strict=True):
            total.scatter_add_(0, level, quantity.to(torch.float64))
    return [total.flip(0).cumsum(0).flip(0) for total in sums]


def _deepest(allowed: Tensor) -> Tensor:
    """Find the first level from which on all may go: (LEVELS + 1, h) -> (h,)."""
    return len(allowed) - allowed.flip(0).long().cumprod(0).sum(0)


def _left_out(dense: DenseEmission, cut: Tensor) -> Tensor:
    """Give the distribution over tokens of what a cut leaves out, nowhere 0: (V,)."""
    total = torch.zeros(dense.vocab_size, dtype=torch.float64, device=dense.table.device)
    everything = torch.zeros_like(total)
    for tokens, p in _walk(dense):
        total[tokens] = torch.where(_level(p) >= cut, p, 0.0).sum(-1, dtype=torch.float64)
        everything[tokens] = p.sum(-1, dtype=torch.float64)
    # The next cut may go deeper: every token keeps a little of its overall share.
    little = 1e-3 * everything / everything.sum() + 1e-3 / len(everything)
    mixed = total / total.sum().clamp_min(1e-300) + little
    return mixed / mixed.sum()


def _assemble(dense: DenseEmission, cut: _Cut) -> SparseEmission:
    """Collect the entries above the cut, less what the background says of them already."""
    counts, states, values = [], [], []
    for tokens, p in _walk(dense):
        rest = p - cut.background[tokens, None] * cut.leak
        kept = (_level(p) < cut.depth) & (rest > 0)
        counts.append(kept.sum(-1))
        states.append(kept.nonzero()[:, 1].int())
        values.append(rest[kept].to(p.dtype))
    offsets = torch.cat([torch.zeros_like(counts[0][:1]), torch.cat(counts).cumsum(0)])
    work = values[0].dtype
    return SparseEmission(
        offsets,
        torch.cat(states),
        torch.cat(values),
        cut.background.to(work),
        cut.leak.to(work),
    )


def _measure(dense: DenseEmission, sparse: SparseEmission) -> tuple[Tensor, Tensor]:
    """Hold sparse against dense: the KL and the total variation of every state, (h,) each."""
    nats = torch.zeros(dense.num_states, dtype=torch.float64, device=dense.table.device)
    moved = torch.zeros_like(nats)
    for tokens, p in _walk(dense):
        p, q = p.to(torch.float64), sparse.rows(tokens).to(torch.float64)
        nats += _surprise(p, q).sum(0)
        moved += (p - q).abs().sum(0) / 2
    return nats, moved
