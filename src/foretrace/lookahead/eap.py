"""The expected attribute probability (EAP) of next tokens: pure functions over many rows.

Shapes: b tokens of a block, n rows, K terms. Rows of one `EapKind` are computed
together, even if their attributes differ. Tensors are token-major: (b, K, n), (b, n).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from foretrace.hmm import inference
from foretrace.lookahead.tables import LOG_ZERO


class EapKind(NamedTuple):
    """The kind of an EAP computation. Rows of one kind can be computed together."""

    num_terms: int
    complement: bool
    """Whether tables and token weights hold 1 minus the weight; see `stores_complement`."""

    @property
    def logarithmic(self) -> bool:
        """Return whether token weights are logarithms: those of one product may differ vastly."""
        return self.num_terms == 1 and not self.complement


class NextTokenJoint(NamedTuple):
    """The HMM's joint expectation of a next token and the tokens that may follow it."""

    joint: Tensor
    """(b, K, n): sum_z predicted[z] emission[x, z] table[r, k, z]."""
    probability: Tensor
    """(b, n): the same without the table."""
    average: Tensor
    """(K, n): the sum of `joint` over all tokens. Tokens that no state emits take this value."""


@dataclass(frozen=True, eq=False)
class TermWeights:
    """Coefficients and weights of the rows' attributes; the same for every block of tokens."""

    coefficients: Tensor  # (K, n) float64
    log_past: Tensor  # (K, n) float64: sums of log-weights of the generated tokens
    token_weights: Sequence[Tensor]
    """The token weights of each distinct attribute, (K, V), in the form of `EapKind`."""
    attribute_index: Tensor  # (n,)
    """The position of each row's attribute in `token_weights`."""

    @cached_property
    def log_scale(self) -> Tensor:
        """Return the logarithm of the factor that all next tokens share: (n,) float64."""
        if len(self.log_past) == 1:
            log_scale = self.log_past[0] + self.coefficients[0].log()
        else:
            log_scale = self.log_past.max(0).values
        return log_scale.clamp_min(LOG_ZERO)

    @cached_property
    def scaled_coefficients(self) -> Tensor:
        """Return the coefficients times the past, divided by exp(log_scale): (K, n) float64."""
        return self.coefficients * (self.log_past - self.log_scale).exp()

    @cached_property
    def coefficient_sum(self) -> Tensor:
        """Return the sum of `scaled_coefficients` over the terms: (n,) float64.

        Sums are those of differences from the largest past, for accuracy where terms cancel.
        """
        rest = (self.coefficients * (self.log_past - self.log_scale).expm1()).sum(0)
        return self.coefficients.sum(0) + rest

    @cached_property
    def _one_hot(self) -> Tensor:
        """Return ones where a row has an attribute: (attributes, n)."""
        index, tables = self.attribute_index, self.token_weights
        return torch.nn.functional.one_hot(index, len(tables)).to(tables[0]).T

    def for_block(self, block: slice) -> Tensor:
        """Return the token weights of a block for every row: (b, K, n), or n = 1 for all."""
        if len(self.token_weights) == 1:
            return self.token_weights[0][:, block].T.unsqueeze(-1)
        stacked = torch.stack([weights[:, block] for weights in self.token_weights], -1)
        if stacked.device.type != "cpu":  # (K, b, attributes)
            return stacked[..., self.attribute_index].transpose(0, 1)
        # A product with a one-hot matrix is exact, and ten times as fast as indexing on CPUs.
        return (stacked @ self._one_hot).transpose(0, 1)


class LogEAP(NamedTuple):
    """The logarithm of an expected attribute probability, `values + log_scale`.

    All next tokens share the scale. It grows with the sequence, until their sum would lose the
    differences between tokens.
    """

    values: Tensor  # (b, n)
    log_scale: Tensor  # (n,)


def compute_eap(kind: EapKind, joint: NextTokenJoint, weights: TermWeights, block: slice) -> LogEAP:
    """Compute the EAP of every token of a block: eq. (EAP)."""
    epsilon = inference.IMPOSSIBLE
    # Contiguous: logarithms of strided values take ten times as long.
    ratio = torch.add(joint.joint, joint.average, alpha=epsilon).contiguous()
    ratio.div_((joint.probability + epsilon).unsqueeze(1))
    log_scale = weights.log_scale.to(ratio)
    if kind.logarithmic:
        log_values = ratio.clamp_min_(epsilon).log_().add_(weights.for_block(block))
        return LogEAP(log_values[:, 0], log_scale)
    if kind.complement:  # 1 - w L = D + (1 - w) (1 - D), with D = 1 - L
        ratio.addcmul_(weights.for_block(block), 1 - ratio)
    else:
        ratio.mul_(weights.for_block(block))
    values = _weighted_sum_(weights.scaled_coefficients, ratio)
    if kind.complement:  # `values` is the sum of the complements
        values = weights.coefficient_sum.to(values) - values
    return LogEAP(values.clamp_min_(epsilon).log_(), log_scale)


def _weighted_sum_(coefficients: Tensor, ratio: Tensor) -> Tensor:
    """Sum over the terms, in the memory of the first: (K, n), (b, K, n) -> (b, n)."""
    coefficients = coefficients.to(ratio)
    total = ratio[:, 0].mul_(coefficients[0])
    for term in range(1, ratio.shape[1]):
        total.addcmul_(ratio[:, term], coefficients[term])
    return total
