"""The protocol of a language model to sample text from, and helpers of its implementations.

Every source samples from the LM's distribution: temperature 1, top-p 1, no top-k. The defaults of a
library (transformers keeps the 50 most likely tokens) would change the distribution that the HMM
learns.
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
    """The name to publish: a hub id, or the name of a folder without its path."""
    vocab_size: int
    eos_token_id: int
    tokenizer_fingerprint: str

    @property
    def batch_size(self) -> int:
        """The number of sequences that are sampled at once."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Convert texts to token ids, without special tokens."""

    def draw(self, prefixes: Sequence[Sequence[int]], length: int, seed: int) -> Tensor:
        """Continue each prefix to `length` tokens, padded with end of text: (n, length)."""

    def close(self) -> None:
        """Free memory and devices; the source cannot be used afterwards."""


def public_name(name: str) -> str:
    """Return the name of a model to publish: of a local folder, its name without the path."""
    folder = Path(name).expanduser()
    return folder.resolve().name if folder.is_dir() else name


def end_of_text_id(tokenizer: "PreTrainedTokenizerBase", token: str | None) -> int:
    """Return the id of the token that begins and ends texts: `token`, or the tokenizer's own."""
    if token is None:
        eos_token_id = tokenizer.eos_token_id
        if eos_token_id is None:
            raise InvalidInputError(
                "The tokenizer has no end-of-text token. Name one: --end-of-text TOKEN."
            )
        return int(eos_token_id)
    token_id = tokenizer.get_vocab().get(token)
    if token_id is None:
        raise InvalidInputError(f"The tokenizer has no token '{token}'. Check the spelling.")
    return int(token_id)


def encode(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> list[list[int]]:
    """Convert texts to token ids, without special tokens."""
    return [list(ids) for ids in tokenizer(list(texts), add_special_tokens=False).input_ids]


def pad_rows(sequences: Sequence[Tensor], length: int, eos_token_id: int) -> Tensor:
    """Cut sequences to `length` tokens, and pad shorter ones with end of text: (n, length)."""
    rows = torch.full((len(sequences), length), eos_token_id)
    for row, tokens in zip(rows, sequences, strict=True):
        row[: len(tokens)] = tokens[:length]
    return rows


def tokenizer_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that every loader accepts, those of tokenizers included."""
    return {key: options[key] for key in ("revision", "trust_remote_code") if key in options}


def load_tokenizer_and_model(
    name: str, tokenizers: Any, load_model: Callable[..., Any], options: Mapping[str, Any]
) -> tuple[Any, Any]:
    """Load a tokenizer and a model; explain the error if they cannot be loaded."""
    try:
        tokenizer = tokenizers.from_pretrained(name, **tokenizer_options(options))
        return tokenizer, load_model(**options)
    except (OSError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise InvalidInputError(
            f"The model '{name}' cannot be loaded ({reason(error)}). Pass the folder or the hub id "
            f"of a causal language model; check the spelling, the network, the dtype and options "
            f"of the engine, and that the device has enough memory."
        ) from error
