"""The few directions in which an LM's hidden states differ most."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import normalize


@dataclass(frozen=True)
class Basis:
    """Principal axes of hidden states, the strong ones toned down.

    Clustering needs a hundred dimensions, not thousands: less to store and to compare. An axis is
    divided by the fourth root of its variance, halfway to all being equal: else the few strongest
    would decide alone.
    """

    mean: Tensor  # (d,)
    axes: Tensor  # (d, r)

    @classmethod
    def of(cls, hidden: Tensor, dimensions: int) -> Self:
        """Find the axes of (m, d) hidden states; fewer than asked for if there are no more."""
        unit = normalize(hidden.double(), dim=-1)
        mean = unit.mean(0)
        variances, axes = torch.linalg.eigh((unit - mean).T @ (unit - mean) / len(unit))
        variances, axes = variances[-dimensions:], axes[:, -dimensions:]
        real = variances > 1e-9 * variances[-1]
        return cls(mean.float(), (axes[:, real] / variances[real] ** 0.25).float())

    def __call__(self, hidden: Tensor) -> Tensor:
        """Give directions: (..., d) -> (..., r), of unit length."""
        return normalize((normalize(hidden.float(), dim=-1) - self.mean) @ self.axes, dim=-1)
