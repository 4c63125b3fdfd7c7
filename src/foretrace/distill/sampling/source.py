"""A language model to sample text from, and helpers of its implementations.

Every source samples from the LM's distribution: temperature 1, top-p 1, no top-k. The defaults of a
library (transformers keeps the 50 most likely tokens) would change the distribution that the HMM
learns.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from foretrace import _io
from foretrace.chat import Prompt, encode_chat, end_of_turn, is_chat
from foretrace.errors import InvalidInputError, reason
from foretrace.vocabulary import fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TokenLists = Sequence[Sequence[int]]
"""Token ids of several texts, contexts or prefixes."""


@dataclass
class Source(ABC):
    """A language model that continues token sequences.

    Attributes:
        name: The name to publish: a hub id, or the name of a folder without its path.
        tokenizer: The tokenizer of the language model.
        ends: The tokens that end a text; in a row, the first of them stands for all.
    """

    name: str
    tokenizer: "PreTrainedTokenizerBase"
    ends: tuple[int, ...]

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """The number of tokens that the language model can emit."""

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """The number of sequences that are sampled at once."""

    @cached_property
    def tokenizer_fingerprint(self) -> str:
        """The fingerprint of the tokenizer's vocabulary."""
        return fingerprint(self.tokenizer.get_vocab())

    @property
    def eos_token_id(self) -> int:
        """The first of the tokens that end a text; it also begins texts."""
        return self.ends[0]

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Convert texts to token ids without special tokens, and chats by the chat template."""
        return [
            encode_chat(self.tokenizer, prompt)
            if is_chat(prompt)
            else list(self.tokenizer(prompt, add_special_tokens=False).input_ids)
            for prompt in prompts
        ]

    def contexts_or_start(self, contexts: TokenLists | None, count: int) -> TokenLists:
        """Return the contexts of `count` rows: by default the token that begins a text."""
        return [[self.eos_token_id]] * count if contexts is None else contexts

    @abstractmethod
    def draw(
        self, prefixes: TokenLists, length: int, seed: int, contexts: TokenLists | None = None
    ) -> Tensor:
        """Continue each prefix to `length` tokens, padded with end of text: (n, length).

        The LM reads the contexts before the prefixes: by default the token that begins a text.
        """

    @abstractmethod
    def close(self) -> None:
        """Free memory and devices; the source cannot be used afterwards."""


class Reader(Protocol):
    """A language model that computes hidden states."""

    @property
    def tokenizer_fingerprint(self) -> str:
        """The fingerprint of the tokenizer's vocabulary."""

    @property
    def eos_token_id(self) -> int:
        """The first of the tokens that end a text."""

    def hidden(self, rows: Tensor, contexts: TokenLists | None = None) -> Tensor:
        """Compute the last layer's hidden states of (n, T) rows: (n, T + 1, d).

        The state at t predicts token t; the state at t + 1 has read it. The LM reads the contexts,
        of at least one token each, before the rows: by default the token that begins a text.
        """

    def close(self) -> None:
        """Free memory and devices; the reader cannot be used afterwards."""


def public_name(name: str) -> str:
    """Return the name of a model to publish: of a local folder or file, its name without a path."""
    path = Path(name).expanduser()
    return path.resolve().name if path.is_dir() or path.is_file() else name


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


def find_ends(
    tokenizer: "PreTrainedTokenizerBase",
    token: str | None,
    *,
    chat: bool,
    model_ends: int | Iterable[int] | None,
) -> tuple[int, ...]:
    """Return the tokens that end a text: of texts one, `token` or the tokenizer's own.

    An answer in a chat usually ends at the end of its turn in the chat template. It also ends at
    `token` or the tokenizer's end of text, and at the model's own ends.
    """
    if not chat:
        return (end_of_text_id(tokenizer, token),)
    named = tokenizer.eos_token_id if token is None else end_of_text_id(tokenizer, token)
    listed = [model_ends] if isinstance(model_ends, int) else list(model_ends or [])
    ends = [end for end in (end_of_turn(tokenizer), named, *listed) if end is not None]
    if not ends:
        raise InvalidInputError(
            "Neither the chat template nor the tokenizer has a token that ends an answer. Name "
            "one: --end-of-text TOKEN."
        )
    return tuple(dict.fromkeys(ends))


def sample_tokens(logits: Tensor) -> Tensor:
    """Sample a token from each row of (n, V) logits: (n,).

    It takes one random number per row, not one for every token of the vocabulary, which on CPUs
    takes as long as a small LM.
    """
    cumulative = logits.float().softmax(-1).cumsum(-1, dtype=torch.float64)
    uniform = torch.rand(len(logits), 1, dtype=torch.float64, device=logits.device)
    token = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    return token.clamp_max_(logits.shape[1] - 1)[:, 0]


def pad_rows(sequences: Sequence[Tensor], length: int, ends: Sequence[int]) -> Tensor:
    """Cut sequences to `length` tokens, and pad them with the first end of text: (n, length).

    It replaces the end of a sequence, so that one token stands for all ends.
    """
    rows = torch.full((len(sequences), length), ends[0])
    for row, tokens in zip(rows, sequences, strict=True):
        row[: len(tokens)] = tokens[:length]
    ended = torch.isin(rows, torch.tensor(ends)).cumsum(1) > 0
    return rows.masked_fill_(ended, ends[0])


def tokenizer_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that every loader accepts, also the loader of tokenizers."""
    return {key: options[key] for key in ("revision", "trust_remote_code") if key in options}


def load_tokenizer_and_model(
    name: str, tokenizers: Any, load_model: Callable[..., Any], options: Mapping[str, Any]
) -> tuple[Any, Any]:
    """Load a tokenizer and a model; explain the error if they cannot be loaded."""
    _io.require_existing_path(name)
    try:
        tokenizer = tokenizers.from_pretrained(name, **tokenizer_options(options))
        return tokenizer, load_model(**options)
    except (OSError, ValueError, TypeError, AttributeError, RuntimeError, ImportError) as error:
        raise InvalidInputError(
            f"The model '{name}' cannot be loaded ({reason(error)}). Pass the folder or the hub id "
            f"of a causal language model; check the spelling, the network, the dtype and options "
            f"of the engine, and that the device has enough memory."
        ) from error
