"""The price of steering: the KL divergence of the steered from the bare next-token distribution."""

from math import log1p
from typing import NamedTuple

import torch
from torch import Tensor

from foretrace.hmm.probability import row_blocks

MIN_LOG_FACTOR = -9e3  # and less: a weight of 0 (MIN_LOG_WEIGHT), or a constraint forbids the token
# A limit is found on a histogram of the distances from the largest log-factor, in nats. Bins have
# about the same width up to NARROW, and grow in proportion to the distance up to MAX_DISTANCE.
BINS, NARROW, MAX_DISTANCE = 512, 1 / 16, 2e4
SHARES = 128  # shares of the log-factors that are tried at once


def prices(bare: Tensor, steered: Tensor) -> Tensor:
    """Compute KL(steered || bare) of every row, in nats: (n, V), (n, V) logits -> (n,)."""
    blocks = row_blocks(bare)
    if len(blocks) > 1:
        return torch.cat([prices(bare[rows], steered[rows]) for rows in blocks])
    log_p, log_q = steered.float().log_softmax(-1), bare.float().log_softmax(-1)
    difference = torch.sub(log_p, log_q, out=log_q)
    # A token that is impossible when steered is NaN here, 0 * inf, and contributes nothing.
    return log_p.exp_().mul_(difference).nansum(-1).clamp_min_(0.0)


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
    forbidden = log_factors <= MIN_LOG_FACTOR
    log_factors.nan_to_num_(0.0, posinf=0.0, neginf=0.0)
    probability = bare.softmax(-1).masked_fill_(forbidden, 0.0)
    shares = _largest_shares(probability, log_factors, limits.to(steered))
    torch.addcmul(bare, log_factors, shares, out=steered).masked_fill_(forbidden, -torch.inf)


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
        place = (distance / NARROW).log1p_().mul_(BINS / log1p(MAX_DISTANCE / NARROW))
        bins = place.long().clamp_(0, BINS - 1)
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
