"""What tokens stand for in a text: bytes, whatever the tokenizer; and goals that texts occur."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Self
from zlib import crc32

from foretrace.attribute import Attribute
from foretrace.errors import InvalidInputError
from foretrace.vocabulary import fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPACE = "\u2581"  # how SentencePiece writes one
BYTE = re.compile(r"<0x([0-9A-F]{2})>")
PROBE = "Is it 12, or naïve 漢字 (\N{GRINNING FACE})?\n\tYes."


@dataclass(frozen=True)
class Spelling:
    """What each token of a tokenizer adds to a text."""

    tokens: Sequence[bytes]
    tokenizer_fingerprint: str | None = None

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerBase") -> Self:
        """Find it out; ask it for several texts rather than the tokenizer for each."""
        return cls(spelled(tokenizer), fingerprint(tokenizer.get_vocab()))

    def mentions(self, texts: str | Sequence[str]) -> Attribute:
        """Make the attribute that a text contains this one, or any of these."""
        known = self.tokenizer_fingerprint
        return Attribute.occurrence(texts, self.tokens, tokenizer_fingerprint=known)

    @cached_property
    def identity(self) -> int:
        """Name it by its content."""
        return crc32(b"\0".join(self.tokens))


def mentions(texts: str | Sequence[str], tokenizer: "PreTrainedTokenizerBase") -> Attribute:
    """Make the attribute that a text contains this one, or any of these: 1 or 0, no doubt.

    Capitals count, and a text may be found within a word. It joins others as any attribute does:
    `nontoxic & mentions("refund", tokenizer) & ~mentions(["sorry", "apolog"], tokenizer)`.
    """
    return Spelling.of(tokenizer).mentions(texts)


def spelled(tokenizer: "PreTrainedTokenizerBase") -> list[bytes]:
    """Give what each token adds to a text: nothing, if it controls the text or is not in use."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    found = [b""] * (max(vocabulary.values()) + 1)
    letters = _letters() if SPACE not in vocabulary else None
    added = tokenizer.added_tokens_decoder
    for token, index in vocabulary.items():
        if index in added:
            found[index] = b"" if added[index].special else added[index].content.encode()
        elif letters is not None:
            found[index] = bytes(letters[each] for each in token if each in letters)
        elif byte := BYTE.fullmatch(token):
            found[index] = bytes([int(byte[1], 16)])
        else:
            found[index] = token.replace(SPACE, " ").encode()
    _check(tokenizer, found)
    return found


def _letters() -> dict[str, int]:
    """Give the byte that each letter of a byte-level vocabulary stands for.

    Bytes that can be printed are themselves, the others follow from 256 on, as GPT-2 has it.
    """
    printed = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    shifted = {chr(256 + place): byte for place, byte in enumerate(others)}
    return {chr(byte): byte for byte in printed} | shifted


def _check(tokenizer: "PreTrainedTokenizerBase", found: Sequence[bytes]) -> None:
    """Raise unless a text is spelled by its own tokens, but for a space before it."""
    ids = tokenizer(PROBE, add_special_tokens=False).input_ids
    text = b"".join(found[each] for each in ids)
    if text.lstrip() != PROBE.encode():
        raise InvalidInputError(
            f"It is not known what the tokens of {type(tokenizer).__name__} stand for: it writes "
            f"{PROBE!r} as {text!r}. Texts that must occur or not need a byte-level or "
            f"SentencePiece tokenizer."
        )
