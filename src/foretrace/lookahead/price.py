"""The price of steering: the KL divergence of the steered from the bare next-token distribution."""

from typing import NamedTuple

import torch
from torch import Tensor

MIN_LOG_FACTOR = -9e3  # and less: a weight of 0 (MIN_LOG_WEIGHT), or a constraint forbids the token
# A limit is found on a histogram of the log-factors: its bins, and the shares of the log-factors
# that are tried at once.
BINS, SHARES = 256, 128


def prices(bare: Tensor, steered: Tensor) -> Tensor:
    """Compute KL(steered || bare) of every row, in nats: (n, V), (n, V) logits -> (n,)."""
    log_p, log_q = steered.float().log_softmax(-1), bare.float().log_softmax(-1)
    # A token that is impossible under both contributes nothing, instead of 0 * (inf - inf).
    difference = torch.where(log_p > -torch.inf, log_p - log_q, 0.0)
    return (log_p.exp() * difference).sum(-1).clamp_min_(0.0)


def limit_prices_(bare: Tensor, steered: Tensor, limits: Tensor) -> None:
    """Lower the strength of rows whose price exceeds a limit, in place: (n, V), (n, V), (n,).

    The log-factor of every token is multiplied by one number from 0 to 1 per row. The price
    increases with that number. Forbidden tokens stay forbidden, whatever that costs.
    """
    if bare.device.type == "cpu":  # few rows exceed their limit, and nothing waits
        rows = (prices(bare, steered) > limits).nonzero()[:, 0]
        if len(rows):
            steered[rows] = _limited(bare[rows], steered[rows], limits[rows]).to(steered)
    else:
        steered.copy_(_limited(bare, steered, limits))


def _limited(bare: Tensor, steered: Tensor, limits: Tensor) -> Tensor:
    """Return steered logits with a price of at most a limit, in float32: (n, V), (n, V), (n,)."""
    bare = bare.float()
    log_factors = (steered.float() - bare).nan_to_num_(0.0, posinf=0.0, neginf=-torch.inf)
    forbidden = log_factors <= MIN_LOG_FACTOR
    log_factors.masked_fill_(forbidden, 0.0)
    probability = bare.softmax(-1).masked_fill_(forbidden, 0.0)
    shares = _largest_shares(probability, log_factors, limits.unsqueeze(1).float())
    return torch.addcmul(bare, log_factors, shares).masked_fill_(forbidden, -torch.inf)


def _largest_shares(probability: Tensor, log_factors: Tensor, limits: Tensor) -> Tensor:
    """Return the largest share of the log-factors that costs at most the limit: (n, 1).

    The price depends on the distribution of the log-factors alone, so that a histogram of them
    gives the prices of many shares at once. Between two of them, the price is interpolated.
    """
    shares = torch.linspace(0.0, 1.0, SHARES + 1, device=limits.device).pow_(3)  # narrow at 0
    price = _Histogram.of(probability, log_factors).prices(shares)  # (n, S)
    last = (price <= limits).sum(1, keepdim=True).sub_(1).clamp_(0, SHARES - 1)
    below, above = price.gather(1, last), price.gather(1, last + 1)
    between = ((limits - below) / (above - below)).nan_to_num_(0.0).clamp_(0.0, 1.0)
    low, high = shares[last], shares[last + 1]
    return torch.lerp(low, high, between)


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
        place = distance.log1p()
        place = place * (BINS / place.amax(1, keepdim=True).clamp_min_(1e-6))
        bins = place.long().clamp_(0, BINS - 1)
        empty = distance.new_zeros(len(distance), BINS)
        mass = empty.scatter_add(1, bins, probability)
        moment = empty.scatter_add(1, bins, probability * distance)
        return cls(mass, moment / mass.clamp_min(1e-30))

    def prices(self, shares: Tensor) -> Tensor:
        """Compute the prices of shares of the log-factors f: (S,) -> (n, S).

        The price of a share s is s E[f] - log sum(p exp(s f)), where E is under the steered
        distribution. A constant that is added to f does not change it.
        """
        distance = self.distance.unsqueeze(2)
        weight = self.mass.unsqueeze(2) * (-distance * shares).exp_()  # (n, B, S)
        total = weight.sum(1)
        mean = weight.mul_(distance).sum(1) / total
        return -shares * mean - total.log()
