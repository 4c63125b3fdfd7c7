"""A language model to draw text from, and what every kind of source needs.

All draw from the LM as it is: temperature 1, top-p 1, no top-k. A library's defaults (transformers
keeps the 50 likeliest tokens) would make the HMM learn another model.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from foretrace.errors import InvalidInputError, reason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Source(Protocol):
    """A language model that continues token sequences."""

    name: str
    """What it is called in what is published: a hub id, or a folder's name without its path."""
    vocab_size: int
    eos_token_id: int
    tokenizer_fingerprint: str

    @property
    def width(self) -> int:
        """How many sequences it draws at once."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Turn texts into token ids, without special tokens."""

    def draw(self, prefixes: Sequence[Sequence[int]], length: int, seed: int) -> Tensor:
        """Continue each prefix to `length` tokens; after its end, end of text: (n, length)."""

    def close(self) -> None:
        """Give back memory and devices; nothing is drawn after that."""


def public_name(name: str) -> str:
    """Name a model as others may read it: a local folder's path says nothing to them."""
    folder = Path(name).expanduser()
    return folder.resolve().name if folder.is_dir() else name


def end_of_text(tokenizer: "PreTrainedTokenizerBase", token: str | None) -> int:
    """Find the token that begins and ends texts: the one named, else the tokenizer's own."""
    if token is None:
        index = tokenizer.eos_token_id
        if index is None:
            raise InvalidInputError(
                "The tokenizer has no end-of-text token. Name one: --end-of-text TOKEN."
            )
        return int(index)
    found = tokenizer.get_vocab().get(token)
    if found is None:
        raise InvalidInputError(f"The tokenizer has no token '{token}'. Check the spelling.")
    return int(found)


def encode(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> list[list[int]]:
    """Turn texts into token ids, without special tokens."""
    return [list(ids) for ids in tokenizer(list(texts), add_special_tokens=False).input_ids]


def padded(texts: Sequence[Tensor], length: int, eos_token_id: int) -> Tensor:
    """Cut texts at `length` tokens, and fill up with end of text those that are shorter."""
    rows = torch.full((len(texts), length), eos_token_id)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = text[:length]
    return rows


def both_know(options: Mapping[str, Any]) -> dict[str, Any]:
    """Choose the options that every loader understands, tokenizers' too."""
    return {key: options[key] for key in ("revision", "trust_remote_code") if key in options}


def load_both(
    name: str, tokenizers: Any, load_model: Callable[..., Any], options: Mapping[str, Any]
) -> tuple[Any, Any]:
    """Load tokenizer and model; say in words what is wrong with the name if it is."""
    try:
        return tokenizers.from_pretrained(name, **both_know(options)), load_model(**options)
    except (OSError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise InvalidInputError(
            f"The model '{name}' cannot be loaded ({reason(error)}). Give the folder or the hub id "
            f"of a causal language model; check the spelling, the network, the dtype and options "
            f"of the engine, and that the device has room for it."
        ) from error
