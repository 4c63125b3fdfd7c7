"""The price of steering, and rules for the steered logits of each row by itself.

The price is the KL divergence of the steered from the bare next-token distribution. The rules are
its limit, end-of-text tokens that keep their probability, and the window outside of which a row is
not steered. All of them need the same sums over the vocabulary, which take most of their time.
"""

from dataclasses import dataclass, replace
from math import log1p
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foretrace.hmm.probability import blocks_of
from foretrace.lookahead.tables import log_zero_for

MIN_LOG_FACTOR = -9e3  # and less: a weight of 0 (MIN_LOG_WEIGHT), or a constraint forbids the token
# A limit is found on a histogram of the distances from the largest log-factor, in nats. Bins have
# about the same width up to NARROW, and grow in proportion to the distance up to MAX_DISTANCE.
BINS, NARROW, MAX_DISTANCE = 512, 1 / 16, 2e4
SHARES = 128  # shares of the log-factors that are tried at once
CACHED_ELEMENTS = 1 << 18  # logits that fit a CPU's caches, with temporary copies of them


def prices(bare: Tensor, steered: Tensor) -> Tensor:
    """Compute KL(steered || bare) of every row, in nats: (n, V), (n, V) logits -> (n,)."""
    parts = [_prices(bare[rows], steered[rows]) for rows in row_blocks(bare, CACHED_ELEMENTS)]
    return torch.cat(parts) if parts else bare.new_zeros(0)


def _prices(bare: Tensor, steered: Tensor) -> Tensor:
    log_p, log_q = steered.float().log_softmax(-1), bare.float().log_softmax(-1)
    difference = torch.sub(log_p, log_q, out=log_q)
    # A token that is impossible when steered is NaN here, 0 * inf, and contributes nothing.
    return log_p.exp_().mul_(difference).nansum(-1).clamp_min_(0.0)


def row_blocks(table: Tensor, elements: int | None) -> list[slice]:
    """Split the rows of a table into blocks of so many elements; None for one block."""
    rows = len(table)
    if elements is None:
        return [slice(0, rows)]
    return list(blocks_of(rows, max(1, elements // table.shape[1])))


def limit_prices_(bare: Tensor, steered: Tensor, limits: Tensor) -> None:
    """Lower the strength of rows so that none costs more than its limit, in place.

    The log-factor of every token is multiplied by one number from 0 to 1 per row. The price
    increases with that number. Forbidden tokens stay forbidden, whatever that costs.

    Args:
        bare: The language model's logits, (n, V).
        steered: The steered logits, (n, V).
        limits: Nats that a row may cost, (n, 1).
    """
    bare = bare.to(steered)
    log_factors = steered - bare
    # A token that was impossible before is NaN here, and counts as forbidden.
    log_factors.nan_to_num_(-MAX_DISTANCE, neginf=-MAX_DISTANCE)
    forbidden = log_factors <= MIN_LOG_FACTOR
    probability = bare.softmax(-1).masked_fill_(forbidden, 0.0)
    shares = _largest_shares(probability, log_factors, limits.to(steered))
    # A forbidden end of text may be the only token left: its logit stays as it is, and finite.
    torch.where(forbidden, steered, torch.addcmul(bare, log_factors, shares), out=steered)


def _largest_shares(probability: Tensor, log_factors: Tensor, limits: Tensor) -> Tensor:
    """Return the largest share of the log-factors that costs at most the limit: (n, 1).

    The price depends on the distribution of the log-factors alone, so that a histogram of them
    gives the prices of many shares at once. They are dense near 0, because a large log-factor
    needs a small share. Between two of them, the price is interpolated.
    """
    minus_steps = torch.linspace(0.0, -1.0, SHARES + 1, dtype=limits.dtype, device=limits.device)
    price = _Histogram.of(probability, log_factors).prices(minus_steps.pow_(3))  # (n, S)
    below, above = price.narrow(1, 0, SHARES), price.narrow(1, 1, SHARES)
    # The part of every interval between two steps that costs at most the limit.
    part = (limits - below).div_((above - below).clamp_min_(1e-12)).clamp_(0.0, 1.0)
    return part.mean(1, keepdim=True).pow_(3)


class _Histogram(NamedTuple):
    """The distribution of log-factors under the language model."""

    mass: Tensor  # (n, B)
    distance: Tensor  # (n, B): mean distance from the largest log-factor, in nats

    @classmethod
    def of(cls, probability: Tensor, log_factors: Tensor) -> "_Histogram":
        """Build the histogram. Bins are narrow near the largest log-factor, where most mass is.

        (n, V), (n, V); the probabilities need not sum to 1.
        """
        distance = log_factors.amax(1, keepdim=True) - log_factors
        coordinate = (distance / NARROW).log1p_().mul_(BINS / log1p(MAX_DISTANCE / NARROW))
        bins = coordinate.long().clamp_(0, BINS - 1)
        empty = distance.new_zeros(len(distance), BINS)
        mass = empty.scatter_add(1, bins, probability)
        moment = empty.scatter_add(1, bins, probability * distance)
        return cls(mass, moment / mass.clamp_min(1e-30))

    def prices(self, minus_shares: Tensor) -> Tensor:
        """Compute the prices of shares of the log-factors f, given with a minus: (S,) -> (n, S).

        The price of a share s is s E[f] - log sum(p exp(s f)), where E is under the steered
        distribution. A constant that is added to f does not change it.
        """
        distance = self.distance.unsqueeze(2)
        weight = self.mass.unsqueeze(2) * (distance * minus_shares).exp_()  # (n, B, S)
        total = weight.sum(1)
        mean = weight.mul_(distance).sum(1) / total
        return minus_shares * mean - total.log()


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
            steered: The steered logits, (n, V). The caller writes the logits of ends again.
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
        for values, new in zip(self[:-1], others[:-1], strict=True):  # not the shared `is_copy`
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


@dataclass(frozen=True, eq=False)
class RowRules:
    """The rules of n rows; None where no row has such a rule."""

    max_price: Tensor | None  # (n, 1) float32: nats that a step may cost
    ends: Tensor | None  # (n, E): tokens that end a text; None if no row keeps their probability
    is_copy: Tensor | None  # (n, E) bool: whether an end is in an earlier column, too
    is_neutral: Tensor | None  # (n, 1) bool: whether ends keep their probability
    is_steered: Tensor | None  # (n, 1) bool: whether the next token is in the window
    vocab_size: int
    """The number of tokens that the HMM knows. All others are forbidden, except neutral ends."""
    row_elements: int | None
    """Logits of a block of rows; None to process all rows at once."""
    limits_all_rows: bool
    """Whether the limit is applied to all rows, or to those that exceed it."""

    def apply_(self, logits: Tensor, steered: Tensor, *, measure: bool) -> Tensor | None:
        """Replace the language model's logits by steered ones that obey the rules.

        Args:
            logits: The language model's logits, (n, V or more). They are replaced.
            steered: The same with the goals' log-factors, (n, V or more). They are overwritten.
            measure: Whether to compute prices.

        Returns:
            If they are computed, the prices of the rows in nats, (n,); 0 outside the window.
        """
        blocks = row_blocks(logits, self.row_elements)
        if len(blocks) == 1:
            return self._apply_(logits, steered, measure)
        parts = [self._part(rows)._apply_(logits[rows], steered[rows], measure) for rows in blocks]
        return torch.cat([part for part in parts if part is not None]) if measure else None

    def _part(self, rows: slice | Tensor) -> "RowRules":
        """Return the rules of some of the rows."""
        tensors: dict[str, Any] = {
            name: one[rows] for name, one in vars(self).items() if isinstance(one, Tensor)
        }
        return replace(self, **tensors)

    def _apply_(self, logits: Tensor, steered: Tensor, measure: bool) -> Tensor | None:
        is_neutral = None
        if self.ends is not None and self.is_neutral is not None:
            # A constraint may forbid an end. That the HMM does not know it does not forbid it.
            is_possible = steered.gather(1, self.ends) > log_zero_for(steered)
            is_neutral = self.is_neutral & is_possible
        if steered.shape[1] > self.vocab_size:
            steered[:, self.vocab_size :] = -torch.inf
        price = None
        if measure or is_neutral is not None or self.max_price is not None:
            normalisers = self._limited(logits, steered, priced=measure)
            if self.ends is not None and is_neutral is not None:
                normalisers = normalisers.with_neutral_ends(is_neutral)
                steered.scatter_(1, self.ends, normalisers.steered_ends)
            price = normalisers.prices() if measure else None
        if self.is_steered is None:
            logits.copy_(steered)
            return price
        torch.where(self.is_steered, steered, logits, out=logits)
        return None if price is None else torch.where(self.is_steered.squeeze(1), price, 0.0)

    def _limited(self, logits: Tensor, steered: Tensor, *, priced: bool) -> Normalisers:
        """Limit the prices of rows, in place, and return the normalisers of the result."""
        if self.max_price is None:
            return self._normalisers(logits, steered, priced=priced)
        if self.limits_all_rows:
            limit_prices_(logits, steered, self.max_price)
            return self._normalisers(logits, steered, priced=priced)
        # Few rows exceed their limit.
        normalisers = self._normalisers(logits, steered, priced=True)
        if self.ends is not None:
            steered.scatter_(1, self.ends, normalisers.steered_ends)
        rows = (normalisers.prices() > self.max_price.squeeze(1)).nonzero()[:, 0]
        if len(rows):
            bare, limited = logits[rows], steered[rows]
            limit_prices_(bare, limited, self.max_price[rows])
            steered[rows] = limited
            normalisers.replace_(rows, self._part(rows)._normalisers(bare, limited, priced=True))
        return normalisers

    def _normalisers(self, logits: Tensor, steered: Tensor, *, priced: bool) -> Normalisers:
        ends, is_copy = self.ends, self.is_copy
        if ends is None or is_copy is None:
            ends = torch.empty(len(logits), 0, dtype=torch.long, device=logits.device)
            is_copy = ends.bool()
        return Normalisers.of(logits, steered, ends, is_copy, priced=priced)
