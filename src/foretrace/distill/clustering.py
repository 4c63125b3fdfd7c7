"""Clusters of hidden states: projection to principal axes, and k-means over streamed vectors."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from foretrace.errors import InvalidInputError

NUDGE = 1 / 1024  # relative distance between the halves of a cluster that is split

Stream = Callable[[], Iterable[Tensor]]
"""Returns the same blocks of vectors, (n, d) float32, at every call."""


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


def initial_centroids(stream: Stream, count: int, seed: int) -> Tensor:
    """Choose `count` of the vectors uniformly at random, without replacement: (count, d)."""
    total = sum(len(block) for block in stream())
    if total < count:
        raise InvalidInputError(
            f"{count} clusters need at least {count} vectors, but there are {total}. Use fewer "
            f"states, or more sequences."
        )
    chosen = np.sort(np.random.default_rng(seed).choice(total, count, replace=False))
    centroids, offset = [], 0
    for block in stream():
        local = chosen[(chosen >= offset) & (chosen < offset + len(block))] - offset
        centroids.append(block[torch.from_numpy(local)])
        offset += len(block)
    return torch.cat(centroids)


def require_faiss() -> Any:  # faiss is not typed
    """Import faiss, or raise an error that says how to install it."""
    try:
        import faiss
    except ImportError:
        raise InvalidInputError(
            "Clustering hidden states needs faiss: pip install 'foretrace[transformers]', or "
            "start at random: --start random."
        ) from None
    return faiss


class NearestCentroid:
    """A search for the nearest of (k, d) centroids, on all GPUs that faiss sees, or on the CPU."""

    def __init__(self, centroids: Tensor) -> None:
        faiss = require_faiss()
        index: Any = faiss.IndexFlatL2(centroids.shape[1])
        if getattr(faiss, "get_num_gpus", lambda: 0)() > 0:
            index = faiss.index_cpu_to_all_gpus(index)
        index.add(centroids.numpy())
        self._index = index

    def __call__(self, block: Tensor) -> Tensor:
        """Return the index of the centroid nearest to each of (n, d) vectors: (n,)."""
        _, nearest = self._index.search(block.numpy(), 1)
        return torch.from_numpy(nearest[:, 0])


def lloyd_step(stream: Stream, centroids: Tensor) -> Tensor:
    """Move each centroid to the mean of the vectors nearest to it, in one pass: (k, d).

    A centroid without vectors takes half of a large cluster.
    """
    nearest = NearestCentroid(centroids)
    sums = torch.zeros_like(centroids, dtype=torch.float64)
    sizes = torch.zeros(len(centroids), dtype=torch.float64)
    for block in stream():
        assignment = nearest(block)
        sums.index_add_(0, assignment, block.double())
        sizes += torch.bincount(assignment, minlength=len(centroids))
    moved = sums.div_(sizes.clamp_min(1)[:, None]).to(centroids.dtype)
    empty = (sizes == 0).nonzero()[:, 0]
    empty = empty[: len(sizes) - len(empty)]  # at most one per cluster that can be split
    moved[sizes == 0] = centroids[sizes == 0]
    largest = sizes.argsort(descending=True)[: len(empty)]
    offset = moved[largest] * NUDGE
    offset[:, ::2] *= -1
    moved[empty], moved[largest] = moved[largest] + offset, moved[largest] - offset
    return moved
