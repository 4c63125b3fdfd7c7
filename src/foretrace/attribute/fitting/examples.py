"""Texts to fit to: windows of token ids, and token counts with scores or labels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from torch import Tensor

from foretrace.attribute.fitting.duplicates import shingles
from foretrace.attribute.token_ids import Texts, concatenate, id_arrays
from foretrace.errors import InvalidInputError

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

WINDOW = 128
BATCH = 10_000  # texts per call of the tokenizer: bounds the memory


class Tokenizer(Protocol):
    """The methods of a tokenizer that are used here; tokenizers of transformers have them."""

    def __call__(
        self, text: list[str], *, add_special_tokens: bool, split_special_tokens: bool
    ) -> Mapping[str, Any]:
        """Tokenize texts; return their ids under "input_ids"."""

    def get_vocab(self) -> dict[str, int]:
        """Return the id of every token."""


class Windows(NamedTuple):
    """Texts in windows of token ids.

    Attributes:
        token_ids: The token ids of each window.
        texts: The index of the text that each window is from.
    """

    token_ids: list[NDArray[np.int32]]
    texts: list[int]


def tokenize(texts: Sequence[str], tokenizer: Tokenizer, window: int = WINDOW) -> Windows:
    """Tokenize texts as continuations, without special tokens, in windows.

    The first word of a continuation follows another word. If the tokenizer marks this by a space
    before the word, as byte-level BPE does, a space is put before the text. A text of more than
    `window` tokens is split into windows of about equal length.

    Args:
        texts: The texts.
        tokenizer: A tokenizer of transformers.
        window: The largest number of tokens in a window.

    Returns:
        The windows, and the text of each window.

    Raises:
        InvalidInputError: If a text is empty or the window is too small.

    Example:
        >>> from foretrace.attribute import tokenize
        >>> tokenize(["one text", "another"], tokenizer).texts
        [0, 1]
    """
    if window < 1:
        raise InvalidInputError(f"The window must be at least 1 token, not {window}.")
    require_content(texts)
    prefix = " " if marks_words_by_space(tokenizer) else ""
    windows = Windows([], [])
    for start in range(0, len(texts), BATCH):
        batch = [text if text[0].isspace() else prefix + text for text in texts[start:][:BATCH]]
        for index, ids in enumerate(_encode(tokenizer, batch), start):
            for piece in _split(np.asarray(ids, dtype=np.int32), window):
                windows.token_ids.append(piece)
                windows.texts.append(index)
    return windows


def require_content(texts: Sequence[str]) -> None:
    """Raise if a text is empty or blank."""
    blank = [number for number, text in enumerate(texts, 1) if not text.strip()]
    if blank:
        raise InvalidInputError(
            f"{len(blank)} of {len(texts)} texts are empty, the first is number {blank[0]}. Leave "
            f"them out."
        )


def marks_words_by_space(tokenizer: Tokenizer) -> bool:
    """Return whether a word after another one is tokenized as the word with a space before it."""
    plain, spaced, following = _encode(tokenizer, ["word", " word", "a word"])
    return plain != spaced and following[-len(spaced) :] == spaced


def _encode(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    # A text that quotes "<|endoftext|>" contains these characters, not the special token.
    encoded = tokenizer(texts, add_special_tokens=False, split_special_tokens=True)
    ids: list[list[int]] = encoded["input_ids"]
    return ids


def _split(ids: NDArray[np.int32], window: int) -> list[NDArray[np.int32]]:
    """Split into as few windows as possible, of about equal length."""
    return np.array_split(ids, max(1, -(-len(ids) // window)))


@dataclass(frozen=True)
class Examples:
    """Texts as token counts, with their probabilities of having the attribute."""

    counts: csr_array  # (n, V)
    shingles: csr_array  # (n, 2**30): runs of tokens, as hashes
    scores: Array  # (n,)
    groups: Indices  # (n,): texts of one group are held out together
    strata: Indices  # (n,): the same share of every stratum is held out

    @classmethod
    def from_scores(
        cls,
        token_ids: Texts,
        scores: Sequence[float] | Tensor,
        vocab_size: int,
        groups: Sequence[int] | None = None,
    ) -> Self:
        """Count the tokens of texts and check their scores.

        Without `groups`, every text is its own group. Texts with a score of at least 0.5 form one
        stratum, and the others a second one.
        """
        values = np.asarray(torch.as_tensor(scores, dtype=torch.float64).cpu())
        _check_one_per_text(len(token_ids), "scores", values)
        invalid = ~((values >= 0) & (values <= 1))
        if invalid.any():
            raise InvalidInputError(
                f"Scores must be probabilities in [0, 1], but {int(invalid.sum())} of "
                f"{len(values)} are not: the first is {values[invalid][0]}, at index "
                f"{int(invalid.argmax())}. Divide all scores by the largest, or remove these "
                f"texts."
            )
        default = np.arange(len(values))
        group_ids = default if groups is None else np.asarray(groups, dtype=np.int64)
        _check_one_per_text(len(token_ids), "groups", group_ids)
        strata = (values >= 0.5).astype(np.int64)
        tokens, ends = _flatten(token_ids, vocab_size)
        counts = _count(tokens, ends, vocab_size)
        return cls(counts, shingles(tokens, ends), values, group_ids, strata)

    @classmethod
    def from_labels(
        cls,
        token_ids: Texts,
        labels: Sequence[str],
        numbers: Mapping[str, int],
        vocab_size: int,
        groups: Sequence[int] | None = None,
    ) -> Self:
        """Count tokens of labelled texts; the number of a label is its stratum, -1 if unknown."""
        strata = np.array([numbers.get(label, -1) for label in labels], dtype=np.int64)
        _check_one_per_text(len(token_ids), "labels", strata)
        zeros = [0.0] * len(strata)
        return replace(cls.from_scores(token_ids, zeros, vocab_size, groups), strata=strata)

    def scored_by_label(self, number: int) -> Self:
        """Return a copy with score 1 for the texts of this label and 0 for all others."""
        return replace(self, scores=(self.strata == number).astype(np.float64))

    def without(self, tokens: Sequence[int]) -> Self:
        """Return a copy whose texts do not contain these tokens."""
        if not len(tokens):
            return self
        if tokens[0] < 0 or tokens[-1] >= self.counts.shape[1]:
            raise InvalidInputError(
                f"The tokens to keep range from {tokens[0]} to {tokens[-1]}, but the vocabulary "
                f"has {self.counts.shape[1]} tokens. Was another tokenizer used?"
            )
        counts = self.counts.copy()
        counts.data[np.isin(counts.indices, np.asarray(tokens))] = 0.0
        counts.eliminate_zeros()
        return replace(self, counts=counts)

    def __len__(self) -> int:
        return len(self.scores)

    @property
    def num_groups(self) -> int:
        """Return the number of groups: of texts, if the rows are windows of texts."""
        return len(np.unique(self.groups))

    def take(self, rows: Indices) -> Self:
        """Return a copy with these rows."""
        return replace(
            self,
            counts=self.counts[rows],
            shingles=self.shingles[rows],
            scores=self.scores[rows],
            groups=self.groups[rows],
            strata=self.strata[rows],
        )


def token_counts(token_ids: Texts, vocab_size: int) -> csr_array:
    """Count the tokens of each text: sparse (n, V)."""
    return _count(*_flatten(token_ids, vocab_size), vocab_size)


def _flatten(token_ids: Texts, vocab_size: int) -> tuple[Indices, Indices]:
    """Return the tokens of all texts, and where each text begins and ends in them: (n + 1,)."""
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
    return flat, np.concatenate([[0], lengths.cumsum()])


def _count(flat: Indices, ends: Indices, vocab_size: int) -> csr_array:
    if len(flat) < np.iinfo(np.int32).max:  # scikit-learn needs 32-bit indices
        flat, ends = flat.astype(np.int32), ends.astype(np.int32)
    counts = csr_array((np.ones(len(flat)), flat, ends), shape=(len(ends) - 1, vocab_size))
    counts.sum_duplicates()
    return counts


def _check_one_per_text(num_texts: int, name: str, values: Array | Indices) -> None:
    if values.shape != (num_texts,):
        raise InvalidInputError(
            f"There are {num_texts} texts, but {name} of shape {values.shape}. Pass one for each "
            f"text."
        )
