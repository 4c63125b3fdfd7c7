"""Token ids: of texts as lists, NumPy arrays or tensors, and binary search in sorted ids."""

from collections.abc import Iterable, Mapping, Sequence, Set
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretrace.errors import InvalidInputError

IdArray = NDArray[np.int64]
Text = Sequence[int] | NDArray[np.integer[Any]] | Tensor
"""The token ids of one text."""
Texts = Sequence[Text] | NDArray[np.integer[Any]] | Tensor
"""The token ids of several texts."""
Mask = Sequence[Any] | NDArray[Any] | Tensor
"""True where there is a token, in the shape of the token ids."""


class FlatTexts(NamedTuple):
    """The token ids of texts, one text after the other, on the CPU."""

    ids: Tensor  # (N,) int64
    text_index: Tensor  # (N,) int64, ascending: the text of each token
    shape: tuple[int, ...]  # of one value per text: (n,), or () for a single text


def flatten(tokens: Text | Texts, mask: Mask | None = None) -> FlatTexts:
    """Concatenate the ids of one text or of several, without the tokens that are masked out.

    Texts may differ in length unless there is a mask.
    """
    single = _is_single(tokens)
    arrays = [_id_array(tokens)] if single else id_arrays(tokens)
    ids = concatenate(arrays)
    lengths = np.array([len(array) for array in arrays], dtype=np.int64)
    text_index = np.repeat(np.arange(len(arrays)), lengths)
    if mask is not None:
        kept = _flat_mask(mask, lengths, single=single)
        ids, text_index = ids[kept], text_index[kept]
    shape = () if single else (len(arrays),)
    return FlatTexts(torch.from_numpy(ids), torch.from_numpy(text_index), shape)


def id_arrays(texts: Any) -> list[IdArray]:
    """Return the ids of each of several texts as an array."""
    if isinstance(texts, Tensor | np.ndarray):
        array = _integer_array(texts)
        if array.ndim != 2:
            raise InvalidInputError(
                f"The token ids must have the shape (texts, tokens), or (tokens,) where one text "
                f"is allowed, not {array.shape}."
            )
        return list(array)
    if isinstance(texts, str | bytes | Mapping | Set) or not isinstance(texts, Iterable):
        raise InvalidInputError(
            f"Texts must be lists, arrays or tensors of token ids, not {type(texts).__name__}. "
            f"Tokenize the texts."
        )
    return [_id_array(text) for text in texts]


def concatenate(arrays: Sequence[IdArray]) -> IdArray:
    """Concatenate arrays; there may be none."""
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int64)


def _is_single(tokens: Any) -> bool:
    """Return whether these are the ids of one text, not of a batch."""
    if isinstance(tokens, Tensor | np.ndarray):
        return tokens.ndim == 1
    if isinstance(tokens, str | bytes) or not isinstance(tokens, Sequence) or not len(tokens):
        return False
    return all(map(_is_id, tokens))


def _is_id(item: Any) -> bool:
    if isinstance(item, Tensor):
        return item.ndim == 0
    return isinstance(item, Integral) and not isinstance(item, bool)


def _id_array(text: Any) -> IdArray:
    """Return the ids of one text: (T,)."""
    array = _integer_array(text)
    if array.ndim != 1:
        raise InvalidInputError(
            f"The token ids of a text must have the shape (tokens,), not {array.shape}."
        )
    return array


def _integer_array(values: Any) -> IdArray:
    if isinstance(values, Tensor):
        name = str(values.dtype).removeprefix("torch.")
        integral = not (values.is_floating_point() or values.is_complex() or name == "bool")
        array = values.detach().cpu().numpy() if integral else np.zeros(0)
    else:
        try:
            array = np.asarray(values)
        except (TypeError, ValueError):
            raise InvalidInputError(
                "The token ids of a text must be a flat list of integers."
            ) from None
        name = array.dtype.name
        integral = array.dtype.kind in "iu" or array.shape == (0,)  # [] has no type
    if not integral:
        raise InvalidInputError(f"The token ids must be integers, not {name}. Tokenize the texts.")
    return array.astype(np.int64, copy=False)


def _flat_mask(mask: Mask, lengths: IdArray, *, single: bool) -> NDArray[np.bool_]:
    """Return which tokens of all texts the mask keeps: (N,)."""
    if len(set(lengths.tolist())) > 1:
        raise InvalidInputError(
            "Texts must have the same length to be used with a mask. Pad them, or leave the mask "
            "out."
        )
    try:
        array = np.asarray(mask.detach().cpu().bool() if isinstance(mask, Tensor) else mask)
    except (TypeError, ValueError):
        array = np.zeros(0, dtype=object)  # rows of different lengths
    length = int(lengths[0]) if len(lengths) else 0
    shape = (length,) if single else (len(lengths), length)
    matches = array.shape == shape or (len(lengths) == 0 == array.size)  # a batch of no texts
    if array.dtype.kind not in "biuf" or not matches:
        raise InvalidInputError(
            f"The mask must have the shape of the token ids, {shape}, with True where there is a "
            f"token; it has the shape {array.shape}."
        )
    return array.astype(bool).ravel()


def find_sorted(sorted_ids: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Find ids in a non-empty sorted tensor: (M,), (...) -> indices (...), whether found (...).

    The index of an id that is not found is valid but has no meaning.
    """
    # torch.searchsorted warns about tensors that are not contiguous: columns, transposed batches.
    wanted = ids.to(sorted_ids.dtype).contiguous()
    index = torch.searchsorted(sorted_ids.contiguous(), wanted).clamp_max_(len(sorted_ids) - 1)
    return index, sorted_ids[index] == ids
