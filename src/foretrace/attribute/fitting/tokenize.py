"""Tokenize texts as continuations, the way they appear in the output of a language model."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from foretrace.errors import InvalidInputError

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
