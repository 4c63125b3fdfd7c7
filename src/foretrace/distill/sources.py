"""Language models to draw text from: transformers, and vLLM where it is installed.

Both draw from the LM as it is: temperature 1, top-p 1, no top-k. A library's defaults (transformers
keeps the 50 likeliest tokens) would make the HMM learn another model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from foretrace.errors import InvalidInputError
from foretrace.vocabulary import fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Source(Protocol):
    """A language model that continues token sequences."""

    name: str
    vocab_size: int
    eos_token_id: int
    tokenizer_fingerprint: str

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Turn texts into token ids, without special tokens."""

    def draw(self, prefixes: Sequence[Sequence[int]], length: int, seed: int) -> Tensor:
        """Continue each prefix to `length` tokens; after its end, end of text: (n, length)."""


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


@dataclass
class TransformersSource:
    """Draws through transformers' `generate`, in batches that shrink when memory runs out."""

    name: str
    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    eos_token_id: int
    batch_size: int = 256
    vocab_size: int = field(init=False)
    tokenizer_fingerprint: str = field(init=False)

    def __post_init__(self) -> None:
        self.vocab_size = int(self.model.config.vocab_size)
        self.tokenizer_fingerprint = fingerprint(self.tokenizer.get_vocab())

    @classmethod
    def load(
        cls, name: str, *, end_of_text_token: str | None = None, **options: Any
    ) -> "TransformersSource":
        """Load a model by folder or hub id; `options` go to `from_pretrained`."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer, model = _load(
            name, AutoTokenizer, partial(AutoModelForCausalLM.from_pretrained, name, **options)
        )
        return cls(name, model.eval(), tokenizer, end_of_text(tokenizer, end_of_text_token))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Turn texts into token ids, without special tokens."""
        return _encode(self.tokenizer, texts)

    def draw(self, prefixes: Sequence[Sequence[int]], length: int, seed: int) -> Tensor:
        """Continue each prefix to `length` tokens: (n, length)."""
        torch.manual_seed(seed)
        rows = torch.empty(len(prefixes), length, dtype=torch.long)
        # Prefixes of like length go together: what the shortest needs, the others throw away.
        waiting = sorted(range(len(prefixes)), key=lambda row: len(prefixes[row]))
        while waiting:
            batch = waiting[: self.batch_size]
            try:
                rows[batch] = self._continue([prefixes[row] for row in batch], length)
            except (torch.OutOfMemoryError, MemoryError) as error:
                self._shrink(error)
                continue
            waiting = waiting[self.batch_size :]
        return rows

    def _shrink(self, error: BaseException) -> None:
        """Go on with half the batch."""
        if self.batch_size == 1:
            raise InvalidInputError(
                "Out of memory with a single sequence. Use a smaller dtype, a smaller LM or "
                "another device."
            ) from error
        self.batch_size //= 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def _continue(self, prefixes: Sequence[Sequence[int]], length: int) -> Tensor:
        longest = max(len(prefix) for prefix in prefixes)
        shortest = min(len(prefix) for prefix in prefixes)
        given = torch.full((len(prefixes), longest + 1), self.eos_token_id)
        mask = torch.zeros_like(given)
        for row, prefix in enumerate(prefixes):  # on the left, padding; then end of text, prefix
            given[row, longest + 1 - len(prefix) :] = torch.tensor(list(prefix), dtype=torch.long)
            mask[row, longest - len(prefix) :] = 1
        generate: Any = self.model.generate  # its type is lost behind a decorator
        drawn: Tensor = generate(
            given.to(self.model.device),
            attention_mask=mask.to(self.model.device),
            do_sample=True,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            max_new_tokens=length - shortest,
            eos_token_id=self.eos_token_id,
            pad_token_id=self.eos_token_id,
        ).cpu()
        texts = [
            row[longest + 1 - len(prefix) :] for row, prefix in zip(drawn, prefixes, strict=True)
        ]
        return _padded(texts, length, self.eos_token_id)


@dataclass
class VLLMSource:
    """Draws through vLLM's offline engine, which batches by itself and spreads over GPUs."""

    name: str
    engine: Any  # vllm.LLM: vLLM is not typed, and not installed everywhere
    tokenizer: "PreTrainedTokenizerBase"
    eos_token_id: int
    vocab_size: int = field(init=False)
    tokenizer_fingerprint: str = field(init=False)

    def __post_init__(self) -> None:
        self.vocab_size = int(self.engine.llm_engine.model_config.get_vocab_size())
        self.tokenizer_fingerprint = fingerprint(self.tokenizer.get_vocab())

    @classmethod
    def load(
        cls, name: str, *, end_of_text_token: str | None = None, **options: Any
    ) -> "VLLMSource":
        """Load a model by folder or hub id; `options` go to `vllm.LLM`."""
        from transformers import AutoTokenizer

        try:
            from vllm import LLM
        except ImportError:
            raise InvalidInputError(
                "vLLM is not installed in this environment: pip install 'foretrace[vllm]', or use "
                "--engine transformers."
            ) from None
        tokenizer, engine = _load(name, AutoTokenizer, partial(LLM, model=name, **options))
        return cls(name, engine, tokenizer, end_of_text(tokenizer, end_of_text_token))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Turn texts into token ids, without special tokens."""
        return _encode(self.tokenizer, texts)

    def draw(self, prefixes: Sequence[Sequence[int]], length: int, seed: int) -> Tensor:
        """Continue each prefix to `length` tokens: (n, length)."""
        from vllm import SamplingParams

        # One seed for all requests would draw the same text for equal prefixes.
        settings = [
            SamplingParams(
                temperature=1.0,
                top_p=1.0,
                top_k=0,
                max_tokens=length - len(prefix),
                stop_token_ids=[self.eos_token_id],
                detokenize=False,
            )
            for prefix in prefixes
        ]
        prompts = [{"prompt_token_ids": [self.eos_token_id, *prefix]} for prefix in prefixes]
        drawn = self.engine.generate(prompts, settings, use_tqdm=False)
        texts = [
            torch.tensor([*prefix, *done.outputs[0].token_ids])
            for prefix, done in zip(prefixes, drawn, strict=True)
        ]
        return _padded(texts, length, self.eos_token_id)


def _encode(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> list[list[int]]:
    return [list(ids) for ids in tokenizer(list(texts), add_special_tokens=False).input_ids]


def _padded(texts: Sequence[Tensor], length: int, eos_token_id: int) -> Tensor:
    """Cut texts at `length` tokens, and fill up with end of text those that are shorter."""
    rows = torch.full((len(texts), length), eos_token_id)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = text[:length]
    return rows


def _load(name: str, tokenizers: Any, load_model: Callable[[], Any]) -> tuple[Any, Any]:
    try:
        return tokenizers.from_pretrained(name), load_model()
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise InvalidInputError(
            f"The model '{name}' cannot be loaded ({reason[0]}). Give the folder or the hub id of "
            f"a causal language model; check the spelling and the network."
        ) from error
