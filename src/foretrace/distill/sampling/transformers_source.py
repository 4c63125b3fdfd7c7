"""Sample text, and compute hidden states, with transformers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foretrace._hardware import default_dtype
from foretrace.distill.sampling.source import (
    encode,
    end_of_text_id,
    load_tokenizer_and_model,
    pad_rows,
    public_name,
)
from foretrace.errors import InvalidInputError
from foretrace.vocabulary import fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass
class TransformersSource:
    """Samples with transformers' `generate`, in batches that shrink when memory runs out."""

    name: str
    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    eos_token_id: int
    batch_size: int = 256
    vocab_size: int = field(init=False)
    tokenizer_fingerprint: str = field(init=False)

    def __post_init__(self) -> None:
        self.vocab_size = int(self.model.config.get_text_config().vocab_size)
        self.tokenizer_fingerprint = fingerprint(self.tokenizer.get_vocab())

    @classmethod
    def load(
        cls,
        name: str,
        *,
        end_of_text_token: str | None = None,
        dtype: "str | torch.dtype" = "auto",
        device: str = "cpu",
        **options: Any,
    ) -> "TransformersSource":
        """Load a model by folder or hub id; `options` go to `from_pretrained`.

        With the dtype `"auto"`, the device decides. A `device_map` among the options replaces
        `device`.
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

        if "device_map" in options:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if dtype == "auto":
            dtype = default_dtype(device)
        tokenizer, model = load_tokenizer_and_model(
            name,
            AutoTokenizer,
            partial(AutoModelForCausalLM.from_pretrained, name),
            {"dtype": dtype, **options},
        )
        if "device_map" not in options:
            model.to(device)
        # A model's generation config may change the distribution, by a repetition penalty for
        # example, and `generate` reads every setting from it that is not passed.
        model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
        eos_token_id = end_of_text_id(tokenizer, end_of_text_token)
        return cls(public_name(name), model.eval(), tokenizer, eos_token_id)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Convert texts to token ids, without special tokens."""
        return encode(self.tokenizer, texts)

    def draw(self, prefixes: Sequence[Sequence[int]], length: int, seed: int) -> Tensor:
        """Continue each prefix to `length` tokens: (n, length)."""
        torch.manual_seed(seed)
        rows = torch.empty(len(prefixes), length, dtype=torch.long)
        # Group prefixes of similar length: all rows of a batch generate as many tokens as the
        # shortest prefix needs.
        order = sorted(range(len(prefixes)), key=lambda row: len(prefixes[row]))
        for batch, drawn in self._in_batches(
            order, lambda batch: self._continue([prefixes[row] for row in batch], length)
        ):
            rows[batch] = drawn
        return rows

    def hidden(self, rows: Tensor) -> Tensor:
        """Compute the last layer's hidden states of (n, T) rows: (n, T + 1, d).

        The state at t predicts token t; the state at t + 1 has read it.
        """
        batches = self._in_batches(range(len(rows)), lambda batch: self._hidden(rows[batch]))
        return torch.cat([hidden for _, hidden in batches])

    def _in_batches(
        self, rows: Sequence[int], work: Callable[[list[int]], Tensor]
    ) -> Iterator[tuple[list[int], Tensor]]:
        """Call `work` on batches of rows, and yield each batch with its result.

        If memory runs out, halve the batch size and try the batch again.
        """
        remaining = list(rows)
        while remaining:
            batch = remaining[: self.batch_size]
            try:
                result = work(batch)
            except (RuntimeError, MemoryError) as error:
                if not _out_of_memory(error):
                    raise
                self._shrink(error)
                continue
            yield batch, result
            remaining = remaining[len(batch) :]

    def _shrink(self, error: BaseException) -> None:
        if self.batch_size == 1:
            raise InvalidInputError(
                "Out of memory with a single sequence. Use a smaller dtype, a smaller LM or "
                "another device."
            ) from error
        self.batch_size //= 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Free the model and its memory."""
        del self.model
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def _hidden(self, rows: Tensor) -> Tensor:
        input_ids = torch.nn.functional.pad(rows.long(), (1, 0), value=self.eos_token_id)
        outputs = self.model.base_model(input_ids.to(self.model.device))
        hidden: Tensor = outputs.last_hidden_state
        return hidden.cpu()

    @torch.inference_mode()
    def _continue(self, prefixes: Sequence[Sequence[int]], length: int) -> Tensor:
        longest = max(len(prefix) for prefix in prefixes)
        shortest = min(len(prefix) for prefix in prefixes)
        input_ids = torch.full((len(prefixes), longest + 1), self.eos_token_id)
        mask = torch.zeros_like(input_ids)
        for row, prefix in enumerate(prefixes):  # padding on the left, end of text, the prefix
            begin = longest + 1 - len(prefix)
            input_ids[row, begin:] = torch.tensor(list(prefix), dtype=torch.long)
            mask[row, begin - 1 :] = 1
        generate: Any = self.model.generate  # a decorator hides its type
        output_ids: Tensor = generate(
            input_ids.to(self.model.device),
            attention_mask=mask.to(self.model.device),
            do_sample=False,
            logits_processor=[keep_sampled_token],
            max_new_tokens=length - shortest,
            eos_token_id=self.eos_token_id,
            pad_token_id=self.eos_token_id,
        ).cpu()
        sequences = [
            row[longest + 1 - len(prefix) :]
            for row, prefix in zip(output_ids, prefixes, strict=True)
        ]
        return pad_rows(sequences, length, self.eos_token_id)


def keep_sampled_token(_: Tensor, logits: Tensor) -> Tensor:
    """Sample a token from each row of (n, V) logits, and set the logits of all others to -inf.

    It takes one random number per row. `generate` with `do_sample` takes one for every token of the
    vocabulary, which on CPUs takes as long as a small LM.
    """
    cumulative = logits.float().softmax(-1).cumsum(-1, dtype=torch.float64)
    uniform = torch.rand(len(logits), 1, dtype=torch.float64, device=logits.device)
    token = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    kept = torch.full_like(logits, -torch.inf)
    return kept.scatter_(1, token.clamp_max_(logits.shape[1] - 1), 0.0)


def _out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out; on CPUs, torch says so only in the message."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return "DefaultCPUAllocator" in str(error)
