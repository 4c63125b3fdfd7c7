"""Hidden states of rows in which some of the probe's logits are masked or changed."""

from typing import NamedTuple

import torch
from torch import Tensor

ROUNDS = 8
MOST_LEFT_OUT = 256
LEAST_PIVOT = 0.05  # below, what is left determines the state badly


class Repaired(NamedTuple):
    """Hidden states (n, d), and whether each is that of the LM (n,)."""

    states: Tensor
    readable: Tensor


class _Fit(NamedTuple):
    states: Tensor
    residual: Tensor
    determined: Tensor


def repair(
    values: Tensor, usable: Tensor, inverse: Tensor, rows: Tensor, tolerance: Tensor
) -> Repaired:
    """Solve each row from the entries that fit together.

    It leaves out entries that are not usable, and then, in a few rounds, those that are furthest
    from what all others predict, until the rest fits.

    Args:
        values: Products of the head's rows with the hidden state, plus a constant a row: (n, m).
        usable: Whether to use an entry at all: (n, m).
        inverse: The inverse of the probe: (d, m).
        rows: The rows of the head: (m, d).
        tolerance: The largest residual per entry of a row that fits: (n,).
    """
    size, width = rows.shape
    most = min((size - width) // 4, MOST_LEFT_OUT)
    centred = rows.float() - rows.float().mean(0)
    own = 1 - 1 / size - (centred * inverse.T).sum(1)  # of the residual, what is the entry's own
    left_out = ~usable
    readable = left_out.sum(1) <= most
    left_out = left_out & readable[:, None]
    for last in [False] * ROUNDS + [True]:
        fit = _fit_without(left_out, values, inverse, centred)
        count = left_out.sum(1)
        freedom = (size - width - 1 - count).clamp_min(1)
        fits = fit.residual.square().sum(1) <= tolerance.square() * freedom
        if last or bool((fits | ~readable).all()):
            break
        distance = fit.residual.abs() / own.clamp_min(LEAST_PIVOT)
        furthest = distance > 0.5 * distance.amax(1, keepdim=True)
        more = left_out | (furthest & ~fits[:, None])
        readable &= more.sum(1) <= most
        left_out = torch.where(readable[:, None], more, left_out)
    return Repaired(fit.states, readable & fits & fit.determined)


def _fit_without(left_out: Tensor, values: Tensor, inverse: Tensor, centred: Tensor) -> _Fit:
    """Fit states to the entries that are not left out.

    This equals a fit to all entries, after those left out are set to the values that make their
    own residuals zero. To find these takes a small system of equations for each row.
    """
    size = values.shape[1]
    filled = values.masked_fill(left_out, 0.0)
    residual = _residual(filled, inverse, centred)[1]
    order = left_out.long().argsort(dim=1, descending=True, stable=True)
    index = order[:, : max(1, int(left_out.sum(1).max()))]  # (n, a), padded with other entries
    real = left_out.gather(1, index)
    system = -1 / size - centred[index] @ inverse.T[index].mT  # (n, a, a)
    system = system * (real[:, :, None] & real[:, None, :])
    system = system + torch.eye(index.shape[1], device=values.device)
    factor, failed = torch.linalg.cholesky_ex((system + system.mT) / 2)
    wanted = -(residual.gather(1, index) * real)[:, :, None]
    change = torch.cholesky_solve(wanted, factor)[:, :, 0]
    filled = filled.scatter_add(1, index, torch.where(real, change, 0.0))
    pivots = factor.diagonal(dim1=1, dim2=2).square().amin(1)
    determined = (failed == 0) & (pivots >= LEAST_PIVOT)
    states, residual = _residual(filled, inverse, centred)
    return _Fit(states, residual.masked_fill(left_out, 0.0), determined)


def _residual(values: Tensor, inverse: Tensor, centred: Tensor) -> tuple[Tensor, Tensor]:
    shifted = values - values.mean(1, keepdim=True)
    states = shifted @ inverse.T
    return states, shifted - states @ centred.T
