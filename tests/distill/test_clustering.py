"""k-means over a stream equals scikit-learn's k-means in memory."""

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from torch import Tensor

from foretrace.distill.clustering import NearestCentroid, Stream, initial_centroids, lloyd_step
from foretrace.errors import InvalidInputError

pytest.importorskip("faiss", reason="needs the extra `transformers`")


def streamed(vectors: Tensor, size: int) -> Stream:
    return lambda: torch.split(vectors, size)


def test_passes_equal_scikit_learn() -> None:
    vectors = torch.randn(3000, 8, generator=torch.Generator().manual_seed(0))
    stream = streamed(vectors, 257)
    ours = start = initial_centroids(stream, 20, seed=0)
    for _ in range(7):
        ours = lloyd_step(stream, ours)
    peer = KMeans(20, init=start.numpy(), n_init=1, max_iter=7, tol=0).fit(vectors.numpy())
    np.testing.assert_allclose(ours.numpy(), peer.cluster_centers_, atol=1e-4)
    expected = peer.predict(vectors.numpy())
    assert (NearestCentroid(ours)(vectors).numpy() == expected).mean() > 0.999


def test_initial_centroids_are_distinct_vectors() -> None:
    vectors = torch.arange(50.0)[:, None].expand(-1, 2).contiguous()
    chosen = initial_centroids(streamed(vectors, 7), 50, seed=3)
    assert torch.equal(chosen, vectors)
    some = initial_centroids(streamed(vectors, 7), 10, seed=3)
    assert len(torch.unique(some[:, 0])) == 10


def test_too_few_vectors() -> None:
    with pytest.raises(InvalidInputError, match="fewer states"):
        initial_centroids(streamed(torch.randn(5, 2), 2), 6, seed=0)


def test_an_empty_cluster_takes_half_of_a_large_one() -> None:
    vectors = torch.cat([torch.randn(100, 2) + 10, torch.randn(10, 2) - 10])
    centroids = torch.tensor([[10.0, 10.0], [-10.0, -10.0], [1000.0, 1000.0]])
    stream = streamed(vectors, 50)
    for _ in range(3):
        centroids = lloyd_step(stream, centroids)
    sizes = torch.bincount(NearestCentroid(centroids)(vectors), minlength=3)
    assert (sizes > 0).all()
    assert sizes[1] == 10


def test_more_empty_clusters_than_full_ones() -> None:
    vectors = torch.randn(40, 2) + 5
    far = torch.full((9, 2), -1000.0)
    centroids = torch.cat([vectors[:1], far])
    moved = lloyd_step(streamed(vectors, 10), centroids)
    assert torch.isfinite(moved).all()
    # One takes half of the cluster; the others follow in later passes.
    assert (NearestCentroid(moved)(vectors) < 2).all()
    for _ in range(5):
        moved = lloyd_step(streamed(vectors, 10), moved)
    assert len(torch.unique(NearestCentroid(moved)(vectors))) == 10
