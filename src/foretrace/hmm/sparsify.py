"""Sparsify an emission table with a bounded loss of log-likelihood.

The bound holds for every state z: KL(p(. | z), sparse(. | z)) <= tolerance, in nats. By the chain
rule, sequences drawn from the HMM lose on average at most `tolerance` nats of log-likelihood per
token. By Pinsker's inequality, the emission distribution of a state changes by at most
sqrt(tolerance / 2) in total variation.

Entries are grouped into levels by the logarithm of their probability. Each state has a cut level:
the entries at and below it are omitted, and the background approximates them.
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
FIRST_TARGET = 0.1  # loss per token that the first cut may have, in nats
LEVELS_PER_OCTAVE = 4  # level l: probabilities near 2**(-l / 4); the last: all smaller ones


@dataclass(frozen=True)
class Sparsification:
    """Measured losses of a sparsification.

    Attributes:
        tolerance: Largest loss that was allowed, in nats per token.
        nats_per_token: Largest KL(dense, sparse) of a state's emission distribution.
        total_variation: Largest total variation between a state's dense and sparse distribution.
        density: Share of the entries that are stored.
    """

    tolerance: float
    nats_per_token: float
    total_variation: float
    density: float


class _Cut(NamedTuple):
    """The cut level of every state, with the background and its weights."""

    level: Tensor  # (h,): entries of this level and below are omitted
    background: Tensor  # (V,)
    leaks: Tensor  # (LEVELS + 1, h): weight of the background, for every possible cut level

    @property
    def leak(self) -> Tensor:
        """Weight of the background at every state's cut level: (h,)."""
        return self.leaks.gather(0, self.level[None])[0]


def sparsify(dense: DenseEmission, tolerance: float) -> tuple[SparseEmission, Sparsification]:
    """Keep as few entries of each state as lose at most `tolerance` nats per token."""
    if not 1e-6 <= tolerance <= 1:
        raise InvalidInputError(
            f"tolerance is {tolerance}, but must be between 1e-6 and 1: it is the largest loss of "
            f"log-likelihood, in nats per token. 1e-3 is a good start."
        )
    cut, increase = _find_cut(dense, tolerance), 1
    while True:
        sparse = _assemble(dense, cut)
        divergence, distance = _measure(dense, sparse)
        exceeded = ~(divergence <= tolerance) & (cut.level < LEVELS)  # LEVELS: nothing is omitted
        if not bool(exceeded.any()):
            break
        # The estimated loss is too small where the background exceeds the probability of a stored
        # entry. Those states store more entries.
        level = torch.where(exceeded, (cut.level + increase).clamp(max=LEVELS), cut.level)
        cut, increase = cut._replace(level=level), 2 * increase
    density = sparse.values.numel() / (sparse.num_states * sparse.vocab_size)
    worst = max(0.0, float(divergence.max())), float(distance.max())
    return sparse, Sparsification(tolerance, *worst, density)


def _find_cut(dense: DenseEmission, target: float) -> _Cut:
    """Find for every state the cut that omits most entries at an estimated loss of `target`.

    The background depends on the cut, and the best cut on the background, so both are refined in
    turn. The first cuts omit too much, so that the background includes the complete floor of a
    smoothed table. Later rounds have smaller targets.
    """
    (mass,) = _tail_sums(dense, lambda tokens, p: [p])
    level = _first_allowed(mass <= FIRST_TARGET)
    for current in _decreasing_targets(target):
        background = _omitted_distribution(dense, level)
        share, divergence = _tail_sums(dense, partial(_background_terms, background))
        leaks = torch.where(mass > 0, mass / share, 0.0)
        loss = divergence - torch.xlogy(mass, leaks)
        level = _first_allowed((loss <= current) & (leaks <= 1))
    return _Cut(level, background, leaks)


def _decreasing_targets(target: float) -> list[float]:
    """List the target of every round: falling to `target`, and then three rounds with it."""
    rounds = [FIRST_TARGET]
    while rounds[-1] > target:
        rounds.append(max(target, rounds[-1] / 10))
    return [max(target, current) for current in rounds] + [target, target]


def _background_terms(background: Tensor, tokens: Tensor, p: Tensor) -> list[Tensor]:
    """Return the background of every entry, and the entry's term of the KL divergence from it."""
    q = background[tokens, None]
    return [q.expand_as(p), _divergence_terms(p, q)]


def _divergence_terms(p: Tensor, q: Tensor) -> Tensor:
    """Compute p log(p / q), 0 where p is 0."""
    return torch.xlogy(p, p) - torch.xlogy(p, q)


def _token_chunks(dense: DenseEmission) -> Iterator[tuple[Tensor, Tensor]]:
    """Iterate over chunks of the vocabulary: (n,) token ids and their (n, h) probabilities."""
    step = max(1, CHUNK_ELEMENTS // dense.num_states)
    for tokens in torch.split(torch.arange(dense.vocab_size, device=dense.table.device), step):
        yield tokens, dense.of_tokens(tokens)


def _level(p: Tensor) -> Tensor:
    """Return the level of every probability; the largest have level 0."""
    return p.log2().mul_(-LEVELS_PER_OCTAVE).clamp_(0, LEVELS - 1).long()


def _tail_sums(
    dense: DenseEmission, quantities: Callable[[Tensor, Tensor], list[Tensor]]
) -> list[Tensor]:
    """Sum quantities of (tokens, probabilities) over the entries at or below each level.

    Each sum is (LEVELS + 1, h): row l is the sum over the entries that a cut at level l omits. The
    last row is 0.
    """
    sums: list[Tensor] = []
    for tokens, p in _token_chunks(dense):
        level, summands = _level(p), quantities(tokens, p)
        sums = sums or [
            torch.zeros(LEVELS + 1, p.shape[1], dtype=torch.float64, device=p.device)
            for _ in summands
        ]
        for total, quantity in zip(sums, summands, strict=True):
            total.scatter_add_(0, level, quantity.to(torch.float64))
    return [total.flip(0).cumsum(0).flip(0) for total in sums]


def _first_allowed(allowed: Tensor) -> Tensor:
    """Find the first level from which on all levels are allowed: (LEVELS + 1, h) -> (h,)."""
    return len(allowed) - allowed.flip(0).long().cumprod(0).sum(0)


def _omitted_distribution(dense: DenseEmission, cut_level: Tensor) -> Tensor:
    """Compute the token distribution of the omitted entries, positive everywhere: (V,)."""
    omitted = torch.zeros(dense.vocab_size, dtype=torch.float64, device=dense.table.device)
    total = torch.zeros_like(omitted)
    for tokens, p in _token_chunks(dense):
        omitted[tokens] = torch.where(_level(p) >= cut_level, p, 0.0).sum(-1, dtype=torch.float64)
        total[tokens] = p.sum(-1, dtype=torch.float64)
    # The next cut may omit other tokens, so every token gets a small probability.
    smoothing = 1e-3 * total / total.sum() + 1e-3 / len(total)
    mixed = omitted / omitted.sum().clamp_min(1e-300) + smoothing
    return mixed / mixed.sum()


def _assemble(dense: DenseEmission, cut: _Cut) -> SparseEmission:
    """Collect the entries above the cut, minus the background's share of them."""
    counts, states, values = [], [], []
    for tokens, p in _token_chunks(dense):
        rest = p - cut.background[tokens, None] * cut.leak
        kept = (_level(p) < cut.level) & (rest > 0)
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
    """Compute every state's KL divergence and total variation, dense against sparse: (h,) each."""
    divergence = torch.zeros(dense.num_states, dtype=torch.float64, device=dense.table.device)
    distance = torch.zeros_like(divergence)
    for tokens, p in _token_chunks(dense):
        p, q = p.to(torch.float64), sparse.of_tokens(tokens).to(torch.float64)
        divergence += _divergence_terms(p, q).sum(0)
        distance += (p - q).abs().sum(0) / 2
    return divergence, distance
