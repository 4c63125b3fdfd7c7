"""Sums over the vocabulary that the rules of a row share.

The limit of the price, neutral ends and the price itself need the normalisers of the same logits,
which take most of their time.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Normalisers(NamedTuple):
    """The normalisers of the bare and the steered logits of n rows, with E ends of text each."""

    log_bare: Tensor  # (n, 1): logsumexp of the bare logits of all tokens but ends
    log_steered: Tensor  # (n, 1): the same of the steered logits
    log_factor: Tensor | None  # (n, 1): mean of steered - bare under their steered distribution
    bare_ends: Tensor  # (n, E): bare logits of the ends
    steered_ends: Tensor  # (n, E)
    is_copy: Tensor  # (n, E) bool: whether an end is in an earlier column, too

    @classmethod
    def of(
        cls, bare: Tensor, steered: Tensor, ends: Tensor, is_copy: Tensor, *, priced: bool
    ) -> "Normalisers":
        """Compute the normalisers, and set the steered logits of ends to -inf.

        Args:
            bare: The language model's logits, (n, V).
            steered: The steered logits, (n, V). The caller writes those of ends again.
            ends: End-of-text tokens of each row, (n, E).
            is_copy: Whether an end is in an earlier column, too, (n, E) bool.
            priced: Whether prices are needed.
        """
        bare_ends, steered_ends = bare.gather(1, ends), steered.gather(1, ends)
        bare.scatter_(1, ends, -torch.inf)
        steered.scatter_(1, ends, -torch.inf)
        sums = _sums(bare.to(steered.dtype), steered, priced=priced)
        bare.scatter_(1, ends, bare_ends)
        return cls(*sums, bare_ends.to(steered.dtype), steered_ends, is_copy)

    def replace_(self, rows: Tensor, others: "Normalisers") -> None:
        """Replace the normalisers of rows, in place: (r,). Their ends are the same."""
        for values, new in zip(self[:-1], others[:-1], strict=True):  # not the plan's `is_copy`
            if values is not None and new is not None:
                values[rows] = new

    def with_neutral_ends(self, is_neutral: Tensor) -> "Normalisers":
        """Return the normalisers after neutral ends get their bare probability back: (n, E)."""
        change = (self.log_steered - self.log_bare).nan_to_num_(0.0, 0.0, 0.0)
        ends = torch.where(is_neutral, self.bare_ends + change, self.steered_ends)
        return self._replace(steered_ends=ends)

    def prices(self) -> Tensor:
        """Compute KL(steered || bare) of every row, in nats: (n,)."""
        assert self.log_factor is not None
        bare_ends, steered_ends = (
            ends.masked_fill(self.is_copy, -torch.inf)
            for ends in (self.bare_ends, self.steered_ends)
        )
        log_bare = torch.cat([self.log_bare, bare_ends], 1).logsumexp(1, keepdim=True)
        logits = torch.cat([self.log_steered, steered_ends], 1)
        log_steered = logits.logsumexp(1, keepdim=True)
        log_factors = torch.cat([self.log_factor, steered_ends - bare_ends], 1)
        # The difference of the normalisers belongs to every summand: their rounding errors cancel.
        log_ratios = log_factors - (log_steered - log_bare)
        # What is impossible when steered is NaN here, 0 * inf, and contributes nothing.
        return (logits - log_steered).exp_().mul_(log_ratios).nansum(1).clamp_min_(0.0)


def _sums(bare: Tensor, steered: Tensor, *, priced: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the normalisers of tokens, except ends, whose logits are -inf: (n, V), (n, V)."""
    log_bare = bare.logsumexp(1, keepdim=True)
    if not priced:
        return log_bare, steered.logsumexp(1, keepdim=True), None
    # One exponential of each logit gives both sums.
    largest = steered.amax(1, keepdim=True).clamp_min_(torch.finfo(steered.dtype).min)
    weight = (steered - largest).exp_()
    total = weight.sum(1, keepdim=True)
    # A token that is impossible when steered is NaN here, 0 * inf, and contributes nothing.
    log_factor = (steered - bare).mul_(weight).nansum(1, keepdim=True) / total
    return log_bare, total.log() + largest, log_factor
