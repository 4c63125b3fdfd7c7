"""The bytes of every token; `contains`, the attribute of texts that contain a string; `marker`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Self
from zlib import crc32

from foretrace.attribute import Attribute
from foretrace.attribute.expression import Contains
from foretrace.errors import InvalidInputError
from foretrace.steering.markers import Marker
from foretrace.vocabulary import fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPACE = "\u2581"  # SentencePiece's symbol for a space
BYTE = re.compile(r"<0x([0-9A-F]{2})>")
PROBE = "Is it 12, or naïve 漢字 (\N{GRINNING FACE})?\n\tYes."


@dataclass(frozen=True)
class TokenBytes:
    """The bytes that each token of a tokenizer adds to a text."""

    tokens: Sequence[bytes]
    tokenizer_fingerprint: str | None = None
    special: Mapping[int, bytes] = field(default_factory=dict)
    """The content of special tokens, which add nothing to a text."""

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerBase") -> Self:
        """Compute the bytes of all tokens, which takes a moment: keep the result for several uses.

        Raises:
            InvalidInputError: The tokenizer is neither byte-level nor SentencePiece.
        """
        added = tokenizer.added_tokens_decoder.items()
        special = {index: token.content.encode() for index, token in added if token.special}
        return cls(decode_vocabulary(tokenizer), fingerprint(tokenizer.get_vocab()), special)

    def contains(self, operand: Contains) -> Attribute:
        """Return the attribute of a `contains(...)` operand."""
        return Attribute.contains(
            operand.texts,
            self.tokens,
            whole_word=operand.whole_word,
            ignore_case=operand.ignore_case,
            tokenizer_fingerprint=self.tokenizer_fingerprint,
        )

    def marker(self, text: str) -> Marker:
        """Return the marker of a string, which may be or contain special tokens."""
        return Marker(text, self._with_special, self.tokenizer_fingerprint)

    @cached_property
    def _with_special(self) -> list[bytes]:
        return [self.special.get(index, content) for index, content in enumerate(self.tokens)]

    @cached_property
    def identity(self) -> int:
        """A checksum of the content."""
        return crc32(b"\0".join(self.tokens))


def contains(
    texts: str | Sequence[str],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    whole_word: bool = False,
    ignore_case: bool = False,
) -> Attribute:
    """Return the attribute that a text contains a string, or one of several.

    Its probability is 1 or 0. It combines with other attributes by `&`, `|` and `~`.

    Args:
        texts: One string, or several of which any may occur.
        tokenizer: The LM's tokenizer.
        whole_word: Whether a string counts only if no letter, digit or underscore is next to it. If
            not, it is also found within words.
        ignore_case: Whether small and capital letters are the same, by Unicode's case folding.

    Returns:
        An attribute.

    Raises:
        InvalidInputError: A string is empty or too long, or the tokenizer is neither byte-level nor
            SentencePiece.

    Example:
        >>> refund = ft.contains("refund", tokenizer)
        >>> ids = tokenizer(["no refund", "no money"]).input_ids
        >>> refund.probability(ids).tolist()
        [1.0, 0.0]
    """
    strings = (texts,) if isinstance(texts, str) else tuple(texts)
    return TokenBytes.of(tokenizer).contains(Contains(strings, whole_word, ignore_case))


def marker(text: str, tokenizer: "PreTrainedTokenizerBase") -> Marker:
    """Return a marker: a string in the generated text after which a goal begins, or ends.

    It is found with any split of the text into tokens, and also if it is a special token. Case
    matters.

    Args:
        text: The string, such as "</think>".
        tokenizer: The LM's tokenizer.

    Returns:
        A marker, for `Goal(after=...)` and `Goal(window=...)`.

    Raises:
        InvalidInputError: The string is empty or too long, or the tokenizer is neither byte-level
            nor SentencePiece.

    Example:
        >>> end_of_thought = ft.marker("</think>", tokenizer)
        >>> end_of_thought.is_suffix_of(tokenizer("<think>Hm.</think>").input_ids)
        True
    """
    return TokenBytes.of(tokenizer).marker(text)


def decode_vocabulary(tokenizer: "PreTrainedTokenizerBase") -> list[bytes]:
    """Return the bytes of each token: none for special tokens and for ids that are not in use."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    token_bytes = [b""] * (max(vocabulary.values()) + 1)
    byte_of = _byte_level_alphabet() if SPACE not in vocabulary else None
    added = tokenizer.added_tokens_decoder
    for token, index in vocabulary.items():
        if index in added:
            token_bytes[index] = b"" if added[index].special else added[index].content.encode()
        elif byte_of is not None:
            token_bytes[index] = bytes(byte_of[letter] for letter in token if letter in byte_of)
        elif byte := BYTE.fullmatch(token):
            token_bytes[index] = bytes([int(byte[1], 16)])
        else:
            token_bytes[index] = token.replace(SPACE, " ").encode()
    _check(tokenizer, token_bytes)
    return token_bytes


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte of each letter of a byte-level vocabulary, as GPT-2 defines it.

    Printable bytes stand for themselves; the others are mapped to code points from 256 on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(256 + i): byte for i, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


def _check(tokenizer: "PreTrainedTokenizerBase", token_bytes: Sequence[bytes]) -> None:
    """Raise unless the tokens of a text add up to the text, apart from a leading space."""
    ids = tokenizer(PROBE, add_special_tokens=False).input_ids
    text = b"".join(token_bytes[i] for i in ids)
    if text.lstrip() != PROBE.encode():
        raise InvalidInputError(
            f"The bytes of the tokens of {type(tokenizer).__name__} are not known: {PROBE!r} "
            f"becomes {text!r}. Required and forbidden texts need a byte-level or SentencePiece "
            f"tokenizer."
        )
