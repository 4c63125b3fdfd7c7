"""The price of steering: the KL divergence of the steered from the bare next-token distribution."""

import torch
from torch import Tensor

MIN_LOG_FACTOR = -9e3  # and less: a weight of 0 (MIN_LOG_WEIGHT), or a constraint forbids the token
ITERATIONS = 12  # of the bisection: the factor is found within 1 / 4096


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
    rows = (prices(bare, steered) > limits).nonzero()[:, 0]
    if not len(rows):
        return
    bare, limits = bare[rows].float(), limits[rows]
    log_factors = steered[rows].float() - bare
    log_factors = log_factors.nan_to_num(0.0, posinf=0.0, neginf=-torch.inf)
    forbidden = log_factors <= MIN_LOG_FACTOR
    log_factors.masked_fill_(forbidden, 0.0)
    low, high = torch.zeros_like(limits), torch.ones_like(limits)
    for _ in range(ITERATIONS):
        middle = (low + high) / 2
        limited = torch.addcmul(bare, log_factors, middle[:, None])
        fits = prices(bare, limited.masked_fill_(forbidden, -torch.inf)) <= limits
        low, high = torch.where(fits, middle, low), torch.where(fits, high, middle)
    limited = torch.addcmul(bare, log_factors, low[:, None]).masked_fill_(forbidden, -torch.inf)
    steered[rows] = limited.to(steered)
