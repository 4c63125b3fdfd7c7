"""Count the tokens of texts. A product of token weights depends only on these counts."""

import numpy as np
from scipy.sparse import csr_array

from foretrace.attribute.texts import Texts, concatenate, id_arrays
from foretrace.errors import InvalidInputError


def token_counts(token_ids: Texts, vocab_size: int) -> csr_array:
    """Count the tokens of each text: sparse (n, V)."""
    arrays = id_arrays(token_ids)
    lengths = np.array([len(ids) for ids in arrays], dtype=np.int64)
    if empty := int((lengths == 0).sum()):
        raise InvalidInputError(
            f"{empty} of {len(lengths)} texts have no tokens. Leave empty texts out."
        )
    if not len(lengths):
        raise InvalidInputError("There are no texts. A fit needs some thousands of texts.")
    flat = concatenate(arrays)
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
