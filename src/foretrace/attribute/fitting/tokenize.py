"""From texts to token ids, as they stand in the middle of what a language model writes."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from foretrace.errors import InvalidInputError

WINDOW = 128
BATCH = 10_000  # texts at once: memory stays bounded, and a fast tokenizer busy


class Tokenizer(Protocol):
    """What is asked of a tokenizer; those of transformers do it."""

    def __call__(
        self, text: list[str], *, add_special_tokens: bool, split_special_tokens: bool
    ) -> Mapping[str, Any]:
        """Tokenize texts: their ids are under "input_ids"."""

    def get_vocab(self) -> dict[str, int]:
        """Give all tokens with their ids."""


class Windows(NamedTuple):
    """Pieces of texts as token ids, and which text each is from."""

    token_ids: list[NDArray[np.int32]]
    texts: list[int]


def tokenize(texts: Sequence[str], tokenizer: Tokenizer, window: int = WINDOW) -> Windows:
    """Tokenize texts as continuations, without special tokens, in windows.

    A continuation's first word follows another one: where the tokenizer marks that by a space
    before the word (as byte-level BPE does), the text gets one. A text of more than `window` tokens
    is cut into equally long windows of no more than that.
    """
    if window < 1:
        raise InvalidInputError(f"A window has 1 token or more, not {window}.")
    require_content(texts)
    lead = " " if marks_words_by_space(tokenizer) else ""
    pieces = Windows([], [])
    for start in range(0, len(texts), BATCH):
        batch = [text if text[0].isspace() else lead + text for text in texts[start:][:BATCH]]
        for place, ids in enumerate(_encode(tokenizer, batch), start):
            for piece in _cut(np.asarray(ids, dtype=np.int32), window):
                pieces.token_ids.append(piece)
                pieces.texts.append(place)
    return pieces


def require_content(texts: Sequence[str]) -> None:
    """Refuse texts without any."""
    blank = [place for place, text in enumerate(texts, 1) if not text.strip()]
    if blank:
        raise InvalidInputError(
            f"{len(blank)} of {len(texts)} texts are empty, the first is number {blank[0]}. Leave "
            f"them out."
        )


def marks_words_by_space(tokenizer: Tokenizer) -> bool:
    """Whether a word after another is tokenized as the word with a space before it."""
    plain, spaced, following = _encode(tokenizer, ["word", " word", "a word"])
    return plain != spaced and following[-len(spaced) :] == spaced


def _encode(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    # A text may quote "<|endoftext|>": that is then text, not the end of it.
    encoded = tokenizer(texts, add_special_tokens=False, split_special_tokens=True)
    ids: list[list[int]] = encoded["input_ids"]
    return ids


def _cut(ids: NDArray[np.int32], window: int) -> list[NDArray[np.int32]]:
    """Cut into as few windows as can be, all of about the same length."""
    return np.array_split(ids, max(1, -(-len(ids) // window)))
