"""Hold out texts to measure a fit on: near duplicates together, the same share of every stratum."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array, vstack
from scipy.sparse.csgraph import connected_components

from foretrace.attribute.fitting.duplicates import Pairs, near_duplicates
from foretrace.attribute.fitting.examples import Examples, Indices
from foretrace.errors import InvalidInputError

MAX_CLUSTER = 0.25  # of a stratum: the fit needs most of the texts
SIMILARITIES = (0.5, 0.7, 0.9, 1.0, np.inf)  # of links; each next one splits larger clusters


@dataclass(frozen=True)
class Split:
    """Texts to fit to, and held-out texts to measure the fit on.

    Attributes:
        fitting: The texts to fit to.
        held_out: The held-out texts.
        near_duplicates: The number of texts with a near duplicate among all texts.
        leaked: The number of held-out texts with a near duplicate among the texts to fit to.
        given: Whether the user chose the held-out texts.
    """

    fitting: Examples
    held_out: Examples
    near_duplicates: int
    leaked: int
    given: bool

    @classmethod
    def of(cls, examples: Examples, validation: Examples | None, share: float, seed: int) -> Self:
        """Hold out the validation texts; without them, a share of the texts at random."""
        if validation is None:
            return cls._at_random(examples, share, seed)
        return cls._with_validation(examples, validation)

    @classmethod
    def _at_random(cls, examples: Examples, share: float, seed: int) -> Self:
        """Hold out texts at random, near duplicates together. Every stratum keeps some to fit."""
        texts, first, text = np.unique(examples.groups, return_index=True, return_inverse=True)
        links = _links(near_duplicates(examples.shingles), text)
        strata = examples.strata[first]
        held_out = _select(clusters_of(links, strata), strata, share, seed)
        if not held_out.any():
            raise InvalidInputError(
                f"{len(texts)} texts are too few to hold some out. A fit needs a few dozen texts "
                f"at least, and some thousands to be good."
            )
        rows = held_out[text]
        return cls(
            examples.take(np.flatnonzero(~rows)),
            examples.take(np.flatnonzero(rows)),
            *_count(links, held_out),
            given=False,
        )

    @classmethod
    def _with_validation(cls, examples: Examples, held_out: Examples) -> Self:
        """Hold out the texts that the user chose."""
        parts = [np.unique(part.groups, return_inverse=True) for part in (examples, held_out)]
        sizes = [len(texts) for texts, _ in parts]
        text = np.concatenate([parts[0][1], parts[1][1] + sizes[0]])
        pairs = near_duplicates(vstack([examples.shingles, held_out.shingles], format="csr"))
        counts = _count(_links(pairs, text), np.repeat([False, True], sizes))
        return cls(examples, held_out, *counts, given=True)

    def scored_by_label(self, number: int) -> Self:
        """Return a copy with score 1 for the texts of this label and 0 for all others."""
        return replace(
            self,
            fitting=self.fitting.scored_by_label(number),
            held_out=self.held_out.scored_by_label(number),
        )

    @property
    def num_texts(self) -> int:
        """The number of all texts."""
        return self.fitting.num_groups + self.held_out.num_groups

    @property
    def record(self) -> dict[str, int]:
        """The number of near duplicates, for the record of the fit."""
        return {"near_duplicates": self.near_duplicates, "held_out_near_duplicates": self.leaked}

    @cached_property
    def repeated_phrases(self) -> float:
        """The share of the held-out texts' token pairs that occur in the texts to fit to."""
        return float(np.isin(self.held_out.shingles.indices, self.fitting.shingles.indices).mean())


def _links(pairs: Pairs, text: Indices) -> Pairs:
    """Return the pairs of texts with near duplicates, from pairs of their rows."""
    first, second = text[pairs.first], text[pairs.second]
    kept = first != second
    return Pairs(first[kept], second[kept], pairs.similarity[kept])


def clusters_of(links: Pairs, strata: Indices) -> Indices:
    """Return the cluster of each text: near duplicates, and their near duplicates.

    Texts of one template may link all texts of a stratum. A cluster of more than MAX_CLUSTER of its
    stratum is split: only links of texts that are more similar count in it.
    """
    count = len(strata)
    _, stratum, stratum_sizes = np.unique(strata, return_inverse=True, return_counts=True)
    clusters, too_large = np.arange(count), np.ones(count, dtype=bool)
    kept = np.ones(len(links.first), dtype=bool)
    for minimum in SIMILARITIES:
        kept &= ~too_large[clusters[links.first]] | (links.similarity >= minimum)
        first, second = links.first[kept], links.second[kept]
        graph = coo_array((np.ones(len(first)), (first, second)), shape=(count, count))
        clusters = connected_components(graph, directed=False)[1].astype(np.int64)
        parts, sizes = np.unique(clusters * count + stratum, return_counts=True)
        cluster, of_stratum = np.divmod(parts, count)
        large = (sizes > 1) & (sizes > MAX_CLUSTER * stratum_sizes[of_stratum])
        if not large.any():
            break
        too_large = np.isin(np.arange(count), cluster[large])
    return clusters


def _select(clusters: Indices, strata: Indices, share: float, seed: int) -> NDArray[np.bool_]:
    """Return which texts to hold out: a share of every stratum, in whole clusters at random.

    Clusters of more texts than that are fitted to, unless a stratum has no smaller one.
    """
    _, first, sizes = np.unique(clusters, return_index=True, return_counts=True)
    strata = strata[first]
    order = np.random.default_rng(seed).permutation(len(sizes))
    held_out = np.zeros(len(sizes), dtype=bool)
    for stratum in np.unique(strata):
        members = order[strata[order] == stratum]
        count = int(share * sizes[members].sum())
        if count:
            count = max(count, int(sizes[members].min()))
            members = members[sizes[members] <= count]
            held_out[members[sizes[members].cumsum() <= count]] = True
    return held_out[clusters]


def _count(links: Pairs, held_out: NDArray[np.bool_]) -> tuple[int, int]:
    """Return how many texts have a near duplicate, and how many held-out ones a fitted one."""
    linked = np.zeros(len(held_out), dtype=bool)
    linked[links.first] = linked[links.second] = True
    crosses = held_out[links.first] != held_out[links.second]
    ends = np.concatenate([links.first[crosses], links.second[crosses]])
    return int(linked.sum()), len(np.unique(ends[held_out[ends]]))
