"""The expected attribute probability of next tokens: pure functions, for many rows at once.

Shapes: a block of b tokens, rows n, terms K. Rows of one kind share a step, whatever their
attributes. Tensors are token-major: (b, K, n), (b, n).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from foretrace.hmm import inference


class Kind(NamedTuple):
    """What decides how an expectation is computed."""

    terms: int
    signed: bool
    """Whether coefficients have both signs: then tables hold 1 minus a product, for its digits."""


class Future(NamedTuple):
    """What the HMM says of next tokens and all that may follow them."""

    joint: Tensor
    """(b, K, n): sum_z predicted[z] emission[x, z] table[r, k, z]."""
    probability: Tensor
    """(b, n): the same without the table."""
    average: Tensor
    """(K, n): what `joint` sums to over all tokens; it stands in for those that no state emits."""


class Weighing(NamedTuple):
    """What the rows' attributes say of tokens."""

    coefficients: Tensor  # (K, n) float64
    past: Tensor  # (K, n) float64: sums of log-weights of what is written
    own: Sequence[Tensor]
    """Of every attribute once, (K, V): weights of tokens; where signed, 1 minus them ..."""
    which: Tensor  # (n,)
    """... and which of them is each row's."""

    def weights(self, block: slice) -> Tensor:
        """Give the weights of a block's tokens for every row: (b, K, n), or n = 1 for all."""
        if len(self.own) == 1:
            return self.own[0][:, block].T.unsqueeze(-1)
        chosen = torch.stack([own[:, block] for own in self.own], -1)  # (K, b, attributes)
        if chosen.device.type != "cpu":
            return chosen[..., self.which].transpose(0, 1)
        # A product with zeros and ones is exact, and on CPUs ten times as fast as a choice.
        ones = torch.nn.functional.one_hot(self.which, len(self.own)).to(chosen)
        return (chosen @ ones.T).transpose(0, 1)


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
    if kind.signed:  # 1 - w L = D + (1 - w) (1 - D), with D = 1 - L
        ratio.addcmul_(weighing.weights(block), 1 - ratio)
    else:
        ratio.mul_(weighing.weights(block))
    coefficients, past = weighing.coefficients, weighing.past
    if kind.terms == 1:
        size = _bounded(past[0] + coefficients[0].log())
        return EAP(ratio[:, 0].clamp_min_(least), size.to(ratio))
    size = _bounded(past.max(0).values)
    share = _summed(coefficients * (past - size).exp(), ratio)
    if kind.signed:  # what is lost was summed: the largest product is 1, others differ from it
        whole = coefficients.sum(0) + (coefficients * (past - size).expm1()).sum(0)
        share = whole.to(share) - share
    return EAP(share.clamp_min_(least), size.to(share))


def expected(kind: Kind, average: Tensor, weighing: Weighing) -> Tensor:
    """Give the EAP of texts as they are, before their next tokens: (K, n) averages -> (n,)."""
    products = 1 - average.double() if kind.signed else average.double()
    shares = weighing.coefficients * weighing.past.exp()
    return (shares * products).sum(0).clamp(0.0, 1.0)


def _bounded(log_size: Tensor) -> Tensor:
    """Keep what is impossible finite: differences of it must be numbers."""
    return log_size.clamp_min(-1e30)


def _summed(shares: Tensor, ratio: Tensor) -> Tensor:
    """Sum over the terms, in the memory of the first: (K, n), (b, K, n) -> (b, n)."""
    weights = shares.to(ratio)
    total = ratio[:, 0].mul_(weights[0])
    for term in range(1, ratio.shape[1]):
        total.addcmul_(ratio[:, term], weights[term])
    return total
