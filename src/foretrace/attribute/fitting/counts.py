"""Token counts of texts: all that a product of token weights depends on."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from foretrace.errors import InvalidInputError

Texts = Sequence[Sequence[int] | NDArray[np.int32]]
"""The token ids of several texts, each a list or an array."""


def flattened(token_ids: Texts) -> NDArray[np.int64]:
    """Concatenate the token ids of all texts."""
    arrays = [np.asarray(ids, dtype=np.int64) for ids in token_ids]
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int64)


def token_counts(token_ids: Texts, vocab_size: int) -> csr_array:
    """Count the tokens of each text: sparse (n, V)."""
    lengths = np.fromiter((len(ids) for ids in token_ids), dtype=np.int64, count=len(token_ids))
    if empty := int((lengths == 0).sum()):
        raise InvalidInputError(
            f"{empty} of {len(lengths)} texts have no tokens. Leave empty texts out."
        )
    if not len(lengths):
        raise InvalidInputError("There are no texts. A fit needs some thousands of texts.")
    flat = flattened(token_ids)
    if flat.min() < 0 or flat.max() >= vocab_size:
        raise InvalidInputError(
            f"Token ids range from {flat.min()} to {flat.max()}, but the vocabulary has "
            f"{vocab_size} tokens. Was another tokenizer used?"
        )
    ends = np.concatenate([[0], lengths.cumsum()])
    if len(flat) < np.iinfo(np.int32).max:  # scikit-learn needs 32-bit indices
        flat, ends = flat.astype(np.int32), ends.astype(np.int32)
    counts = csr_array((np.ones(len(flat)), flat, ends), shape=(len(lengths), vocab_size))
    counts.sum_duplicates()
    return counts
