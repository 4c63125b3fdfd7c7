"""The expected attribute probability of next tokens: pure functions, for many rows at once.

Shapes: a block of b tokens, rows n, terms K. Rows of one kind share a step, whatever their
attributes. Tensors are token-major: (b, K, n), (b, n).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from foretrace.hmm import inference


class Kind(NamedTuple):
    """What decides how an expectation is computed."""

    terms: int
    complement: bool
    """Whether tables hold 1 minus a product, for its digits: where coefficients have both signs."""


class Future(NamedTuple):
    """What the HMM says of next tokens and all that may follow them."""

    joint: Tensor
    """(b, K, n): sum_z predicted[z] emission[x, z] table[r, k, z]."""
    probability: Tensor
    """(b, n): the same without the table."""
    average: Tensor
    """(K, n): what `joint` sums to over all tokens; it stands in for those that no state emits."""


@dataclass(frozen=True, eq=False)
class Weighing:
    """What the rows' attributes say of tokens; the same for every block of them."""

    coefficients: Tensor  # (K, n) float64
    past: Tensor  # (K, n) float64: sums of log-weights of what is written
    own: Sequence[Tensor]
    """Of every attribute once, (K, V): weights of tokens, or 1 minus them ..."""
    which: Tensor  # (n,)
    """... and which of them is each row's."""

    @cached_property
    def log_size(self) -> Tensor:
        """The size of what is written, common to all next tokens: (n,) float64."""
        only = len(self.past) == 1
        size = self.past[0] + self.coefficients[0].log() if only else self.past.max(0).values
        return size.clamp_min(-1e30)  # what is impossible stays finite: differences are numbers

    @cached_property
    def shares(self) -> Tensor:
        """The terms' weights beside that size: (K, n) float64."""
        return self.coefficients * (self.past - self.log_size).exp()

    @cached_property
    def whole(self) -> Tensor:
        """What the shares sum to; counted from the largest, 1, for its digits: (n,) float64."""
        rest = (self.coefficients * (self.past - self.log_size).expm1()).sum(0)
        return self.coefficients.sum(0) + rest

    @cached_property
    def _choice(self) -> Tensor:
        """Ones where a row has an attribute: (attributes, n)."""
        return torch.nn.functional.one_hot(self.which, len(self.own)).to(self.own[0]).T

    def weights(self, block: slice) -> Tensor:
        """Give the weights of a block's tokens for every row: (b, K, n), or n = 1 for all."""
        if len(self.own) == 1:
            return self.own[0][:, block].T.unsqueeze(-1)
        chosen = torch.stack([own[:, block] for own in self.own], -1)  # (K, b, attributes)
        if chosen.device.type != "cpu":
            return chosen[..., self.which].transpose(0, 1)
        # A product with zeros and ones is exact, and on CPUs ten times as fast as a choice.
        return (chosen @ self._choice).transpose(0, 1)


class EAP(NamedTuple):
    """An expected attribute probability: `share` times exp(`log_size`), at most 1.

    What is written may be so improbable that the product is smaller than any float32. The size is
    common to all next tokens.
    """

    share: Tensor  # (b, n)
    log_size: Tensor  # (n,)


def expect(kind: Kind, future: Future, weighing: Weighing, block: slice) -> EAP:
    """Give the EAP of every token of a block: eq. (EAP)."""
    least = inference.IMPOSSIBLE
    # A copy, one number after the other: logarithms of what is scattered take ten times as long.
    ratio = torch.add(future.joint, future.average, alpha=least).contiguous()
    ratio.div_((future.probability + least).unsqueeze(1))
    if kind.complement:  # 1 - w L = D + (1 - w) (1 - D), with D = 1 - L
        ratio.addcmul_(weighing.weights(block), 1 - ratio)
    else:
        ratio.mul_(weighing.weights(block))
    size = weighing.log_size.to(ratio)
    if kind.terms == 1:
        return EAP(ratio[:, 0].clamp_min_(least), size)
    share = _summed(weighing.shares, ratio)
    if kind.complement:  # what is lost was summed
        share = weighing.whole.to(share) - share
    return EAP(share.clamp_min_(least), size)


def expected(kind: Kind, average: Tensor, weighing: Weighing) -> Tensor:
    """Give the EAP of texts as they are, before their next tokens: (K, n) averages -> (n,)."""
    products = 1 - average.double() if kind.complement else average.double()
    shares = weighing.coefficients * weighing.past.exp()
    return (shares * products).sum(0).clamp(0.0, 1.0)


def _summed(shares: Tensor, ratio: Tensor) -> Tensor:
    """Sum over the terms, in the memory of the first: (K, n), (b, K, n) -> (b, n)."""
    weights = shares.to(ratio)
    total = ratio[:, 0].mul_(weights[0])
    for term in range(1, ratio.shape[1]):
        total.addcmul_(ratio[:, term], weights[term])
    return total
