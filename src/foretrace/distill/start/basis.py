"""Principal axes of an LM's hidden states."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import normalize


@dataclass(frozen=True)
class Basis:
    """A projection of hidden states to their principal axes, with the strong axes damped.

    k-means needs a hundred dimensions, not thousands: fewer to store and to compare. Each axis is
    divided by the fourth root of its variance: halfway to whitening. Otherwise the few strongest
    axes would dominate the distances.
    """

    mean: Tensor  # (d,)
    axes: Tensor  # (d, r)

    @classmethod
    def fit(cls, hidden: Tensor, dimensions: int) -> Self:
        """Compute the axes of (m, d) hidden states, at most `dimensions`."""
        unit = normalize(hidden.double(), dim=-1)
        mean = unit.mean(0)
        variances, axes = torch.linalg.eigh((unit - mean).T @ (unit - mean) / len(unit))
        variances, axes = variances[-dimensions:], axes[:, -dimensions:]
        nonzero = variances > 1e-9 * variances[-1]
        return cls(mean.float(), (axes[:, nonzero] / variances[nonzero] ** 0.25).float())

    def __call__(self, hidden: Tensor) -> Tensor:
        """Project hidden states to vectors of unit length: (..., d) -> (..., r)."""
        return normalize((normalize(hidden.float(), dim=-1) - self.mean) @ self.axes, dim=-1)
