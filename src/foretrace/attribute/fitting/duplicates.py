"""Find texts that are near duplicates of each other, by MinHash and an exact comparison.

Two texts are near duplicates if the Jaccard similarity of their token pairs is at least 0.5.
MinHash with banding proposes pairs of texts, in 60 multiplications and comparisons per token and
20 sorts of all texts. The similarity of each proposed pair is then computed exactly.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from foretrace.attribute.token_ids import IdArray

SHINGLE = 2  # tokens: texts of one template stay similar if a few of its words are replaced
MIN_SIMILARITY = 0.5  # unrelated texts have less than 0.1
BANDS, ROWS = 20, 3  # find a pair of similarity 0.5 with probability 0.93, of 0.6 with 0.99
CHUNK = 1 << 17  # hashes or pairs at a time: bounds the memory
NO_TOKEN = 0xFFFFFFFF

Hashes = NDArray[np.uint32]


class Pairs(NamedTuple):
    """Pairs of rows that are near duplicates."""

    first: IdArray
    second: IdArray
    similarity: NDArray[np.float64]


def shingles(tokens: IdArray, ends: IdArray) -> csr_array:
    """Return the runs of SHINGLE tokens of each text, as hashes: sparse (n, 2**30).

    A shorter text has one shingle. `ends` (n + 1,) delimits the texts in `tokens`.
    """
    lengths = np.diff(ends)
    to_end = np.repeat(ends[1:], lengths) - np.arange(len(tokens))
    ids = tokens.astype(np.uint32)
    hashes = _mix(ids)
    for offset in range(1, SHINGLE):
        following = np.full_like(ids, NO_TOKEN)
        following[:-offset] = ids[offset:]
        following[to_end <= offset] = NO_TOKEN
        hashes = _mix(hashes ^ following)
    kept = to_end >= SHINGLE
    kept[ends[:-1]] = True
    starts = np.concatenate([[0], np.maximum(lengths - SHINGLE + 1, 1).cumsum()])
    small = np.int32 if starts[-1] < np.iinfo(np.int32).max else np.int64
    columns, starts = (hashes[kept] >> 2).astype(small), starts.astype(small)
    return csr_array((np.ones(len(columns), np.int8), columns, starts), (len(lengths), 1 << 30))


def near_duplicates(texts: csr_array) -> Pairs:
    """Find pairs of near duplicates. A text has a pair with one or more of its duplicates.

    Pairs link all texts of a set of near duplicates, but not all pairs of the set are returned.
    """
    count = texts.shape[0]
    codes = np.zeros(0, np.int64)
    random = np.random.default_rng(0)
    for factors in random.integers(1 << 32, size=(BANDS, ROWS, 2), dtype=np.uint32):
        keys = _band(texts, factors)
        order = np.argsort(keys, kind="stable")
        equal = np.flatnonzero(keys[order[1:]] == keys[order[:-1]])
        codes = np.union1d(codes, order[equal] * count + order[equal + 1])
    first, second = np.divmod(codes, count)
    similarity = _similarity(texts, first, second)
    kept = similarity >= MIN_SIMILARITY
    return Pairs(first[kept], second[kept], similarity[kept])


def _band(texts: csr_array, factors: Hashes) -> NDArray[np.uint64]:
    """Return a key of each text: texts of similarity s have equal keys with probability s**ROWS."""
    starts = texts.indptr
    keys = np.zeros(texts.shape[0], np.uint64)
    row = 0
    while row < len(keys):
        stop = max(row + 1, int(np.searchsorted(starts, starts[row] + CHUNK, "right")) - 1)
        part = texts.indices[starts[row] : starts[stop]].astype(np.uint32)
        for factor, offset in factors:
            permuted = part * (factor | np.uint32(1)) + offset
            smallest = np.minimum.reduceat(permuted, starts[row:stop] - starts[row])
            keys[row:stop] = keys[row:stop] * np.uint64(0x9E3779B97F4A7C15) + smallest
        row = stop
    return keys


def _similarity(texts: csr_array, first: IdArray, second: IdArray) -> NDArray[np.float64]:
    """Compute the Jaccard similarity of pairs of texts."""
    rows, index = np.unique(np.concatenate([first, second]), return_inverse=True)
    sets = texts[rows].astype(np.int32)
    sets.sum_duplicates()
    sets.data[:] = 1
    sizes = np.diff(sets.indptr)
    one, other = index[: len(first)], index[len(first) :]
    shared = np.zeros(len(first))
    step = max(1, CHUNK // max(1, int(sizes.max(initial=1))))
    for start in range(0, len(first), step):
        part = slice(start, start + step)
        shared[part] = sets[one[part]].multiply(sets[other[part]]).sum(1)
    return np.asarray(shared / (sizes[one] + sizes[other] - shared))


def _mix(values: Hashes) -> Hashes:
    """Mix the bits of integers, one to one."""
    mixed = values + np.uint32(0x9E3779B9)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        mixed = np.asarray((mixed ^ (mixed >> shift)) * np.uint32(factor), dtype=np.uint32)
    return np.asarray(mixed ^ (mixed >> 16), dtype=np.uint32)
