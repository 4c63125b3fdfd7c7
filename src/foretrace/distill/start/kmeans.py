"""k-means over vectors that are streamed, not held: faiss finds the nearest centroids."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretrace.errors import InvalidInputError

NUDGE = 1 / 1024  # how far the halves of a split cluster start apart

Stream = Callable[[], Iterable[Tensor]]
"""Gives the same blocks of vectors, (n, d) float32, every time it is called."""


def first_centroids(stream: Stream, count: int, seed: int) -> Tensor:
    """Choose `count` of the vectors at random, each as likely: (count, d)."""
    total = sum(len(block) for block in stream())
    if total < count:
        raise InvalidInputError(
            f"{count} clusters need as many vectors, but there are {total}. Give fewer states, or "
            f"more sequences."
        )
    chosen = np.sort(np.random.default_rng(seed).choice(total, count, replace=False))
    found, before = [], 0
    for block in stream():
        here = chosen[(chosen >= before) & (chosen < before + len(block))] - before
        found.append(block[torch.from_numpy(here)])
        before += len(block)
    return torch.cat(found)


def require_faiss() -> Any:  # it is not typed
    """Import faiss, or say how to get it."""
    try:
        import faiss
    except ImportError:
        raise InvalidInputError(
            "Clustering hidden states needs faiss: pip install 'foretrace[transformers]', or "
            "start at random: --start random."
        ) from None
    return faiss


class Nearest:
    """Finds the nearest of (k, d) centroids, on all GPUs that faiss sees, else on the CPU."""

    def __init__(self, centroids: Tensor) -> None:
        faiss = require_faiss()
        index: Any = faiss.IndexFlatL2(centroids.shape[1])
        if getattr(faiss, "get_num_gpus", lambda: 0)() > 0:
            index = faiss.index_cpu_to_all_gpus(index)
        index.add(centroids.numpy())
        self._index = index

    def __call__(self, block: Tensor) -> Tensor:
        """Give the number of the centroid nearest to each of (n, d) vectors: (n,)."""
        _, nearest = self._index.search(block.numpy(), 1)
        return torch.from_numpy(nearest[:, 0])


def improve(stream: Stream, centroids: Tensor) -> Tensor:
    """Move each centroid to the mean of the vectors nearest to it: one pass, (k, d).

    A centroid that no vector is nearest to takes half of a large cluster.
    """
    nearest = Nearest(centroids)
    sums = torch.zeros_like(centroids, dtype=torch.float64)
    sizes = torch.zeros(len(centroids), dtype=torch.float64)
    for block in stream():
        which = nearest(block)
        sums.index_add_(0, which, block.double())
        sizes += torch.bincount(which, minlength=len(centroids))
    moved = sums.div_(sizes.clamp_min(1)[:, None]).to(centroids.dtype)
    empty = (sizes == 0).nonzero()[:, 0]
    empty = empty[: len(sizes) - len(empty)]  # no more than there are clusters to halve
    moved[sizes == 0] = centroids[sizes == 0]
    largest = sizes.argsort(descending=True)[: len(empty)]
    apart = moved[largest] * NUDGE
    apart[:, ::2] *= -1
    moved[empty], moved[largest] = moved[largest] + apart, moved[largest] - apart
    return moved
