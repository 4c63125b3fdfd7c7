"""The expected attribute probability of every next token: pure functions, for many rows at once.

Shapes: rows n, terms K, vocabulary V. Rows of one kind share a step, whatever their attributes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from foretrace.attribute.terms import combined
from foretrace.hmm import inference


class Kind(NamedTuple):
    """What decides how an expectation is computed."""

    terms: int
    signed: bool
    """Whether coefficients have both signs: then tables hold 1 minus a product, for its digits."""
    neutral_end: bool


class Future(NamedTuple):
    """What the HMM says of the next token and all that may follow it."""

    joint: Tensor
    """(n, K, V): sum_z predicted[z] emission[x, z] table[r, k, z]."""
    probability: Tensor
    """(n, V): the same without the table."""
    average: Tensor
    """(n, K): what `joint` sums to; it stands in for tokens that no state emits."""


class Weighing(NamedTuple):
    """What the rows' attributes say of tokens."""

    coefficients: Tensor  # (n, K) float64
    past: Tensor  # (n, K) float64: sums of log-weights of what is written
    own: Tensor  # (n, K, V): weights; where signed, 1 minus them


def log_eap(kind: Kind, future: Future, weighing: Weighing, ends: Sequence[int]) -> Tensor:
    """Give log EAP of every next token: eq. (EAP) -> (n, V), at most 0.

    With a neutral end, tokens of `ends` count as the average of what may come.
    """
    least = inference.IMPOSSIBLE
    ratio = torch.add(future.joint, future.average.unsqueeze(-1), alpha=least)
    ratio.div_((future.probability + least).unsqueeze(1))
    if kind.signed:  # 1 - w L = D + (1 - w) (1 - D), with D = 1 - L
        ratio.addcmul_(weighing.own, 1 - ratio)
    else:
        ratio.mul_(weighing.own)
    if kind.neutral_end:
        ratio[..., list(ends)] = future.average.unsqueeze(-1)
    coefficients, past = weighing.coefficients, weighing.past
    if kind.signed:
        lost = _summed(coefficients * past.exp(), ratio)
        eap = combined(coefficients, past).to(lost).unsqueeze(-1) - lost
        return eap.clamp_(least, 1.0).log_()
    # The past may be smaller than any float32: its size is put aside as a logarithm.
    size = past.max(-1, keepdim=True).values.clamp_min(-1e30)
    eap = _summed(coefficients * (past - size).exp(), ratio)
    return eap.clamp_min_(least).log_().add_(size.to(eap)).clamp_max_(0.0)


def expected(kind: Kind, average: Tensor, weighing: Weighing) -> Tensor:
    """Give the EAP of texts as they are, before their next tokens: (n, K) averages -> (n,)."""
    products = 1 - average.double() if kind.signed else average.double()
    shares = weighing.coefficients * weighing.past.exp()
    return (shares * products).sum(-1).clamp(0.0, 1.0)


def _summed(shares: Tensor, ratio: Tensor) -> Tensor:
    """Sum over the terms, reusing the memory of the first: (n, K), (n, K, V) -> (n, V)."""
    weights = shares.to(ratio).unsqueeze(-1)
    total = ratio[:, 0].mul_(weights[:, 0])
    for term in range(1, ratio.shape[1]):
        total.addcmul_(ratio[:, term], weights[:, term])
    return total
