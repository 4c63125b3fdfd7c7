"""Sample text, and compute hidden states, with transformers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from foretrace._hardware import default_dtype
from foretrace.chat import Prompt
from foretrace.distill.sampling.source import (
    encode,
    find_ends,
    load_tokenizer_and_model,
    pad_rows,
    public_name,
    sample_tokens,
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
    ends: tuple[int, ...]
    batch_size: int = 256
    vocab_size: int = field(init=False)
    tokenizer_fingerprint: str = field(init=False)

    def __post_init__(self) -> None:
        self.vocab_size = int(self.model.config.get_text_config().vocab_size)
        self.tokenizer_fingerprint = fingerprint(self.tokenizer.get_vocab())

    @property
    def eos_token_id(self) -> int:
        """The first of the tokens that end a text; it also begins texts."""
        return self.ends[0]

    @classmethod
    def load(
        cls,
        name: str,
        *,
        end_of_text_token: str | None = None,
        chat: bool = False,
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
        ends = find_ends(
            tokenizer,
            end_of_text_token,
            chat=chat,
            model_ends=model.generation_config.eos_token_id,
        )
        # A model's generation config may change the distribution, by a repetition penalty for
        # example, and `generate` reads every setting from it that is not passed.
        model.generation_config = GenerationConfig()
        return cls(public_name(name), model.eval(), tokenizer, ends)

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Convert texts to token ids without special tokens, and chats by the chat template."""
        return encode(self.tokenizer, prompts)

    def draw(
        self,
        prefixes: Sequence[Sequence[int]],
        length: int,
        seed: int,
        contexts: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """Continue each prefix to `length` tokens: (n, length)."""
        torch.manual_seed(seed)
        contexts = self._default(contexts, len(prefixes))
        rows = torch.empty(len(prefixes), length, dtype=torch.long)
        # Group prefixes of similar length: all rows of a batch generate as many tokens as the
        # shortest prefix needs.
        order = sorted(
            range(len(prefixes)), key=lambda row: (len(prefixes[row]), len(contexts[row]))
        )

        def work(batch: list[int]) -> Tensor:
            return self._continue(
                [contexts[row] for row in batch], [prefixes[row] for row in batch], length
            )

        for batch, drawn in self._in_batches(order, work):
            rows[batch] = drawn
        return rows

    def hidden(self, rows: Tensor, contexts: Sequence[Sequence[int]] | None = None) -> Tensor:
        """Compute the last layer's hidden states of (n, T) rows: (n, T + 1, d).

        The state at t predicts token t; the state at t + 1 has read it. The LM reads the contexts,
        of at least one token each, before the rows: by default the token that begins a text.
        """
        contexts = self._default(contexts, len(rows))
        batches = self._in_batches(
            range(len(rows)),
            lambda batch: self._hidden(rows[batch], [contexts[row] for row in batch]),
        )
        return torch.cat([hidden for _, hidden in batches])

    def _default(
        self, contexts: Sequence[Sequence[int]] | None, count: int
    ) -> Sequence[Sequence[int]]:
        return [[self.eos_token_id]] * count if contexts is None else contexts

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
    def _hidden(self, rows: Tensor, contexts: Sequence[Sequence[int]]) -> Tensor:
        sequences = [
            torch.cat([torch.tensor(list(context)), row])
            for context, row in zip(contexts, rows.long(), strict=True)
        ]
        input_ids = pad_sequence(sequences, batch_first=True)  # the LM is causal: no mask is needed
        outputs = self.model.base_model(input_ids.to(self.model.device))
        hidden: Tensor = outputs.last_hidden_state
        last = [len(context) - 1 for context in contexts]
        length = rows.shape[1] + 1
        return torch.stack(
            [row[start : start + length] for row, start in zip(hidden.cpu(), last, strict=True)]
        )

    @torch.inference_mode()
    def _continue(
        self, contexts: Sequence[Sequence[int]], prefixes: Sequence[Sequence[int]], length: int
    ) -> Tensor:
        inputs = [[*start, *prefix] for start, prefix in zip(contexts, prefixes, strict=True)]
        longest, shortest = max(map(len, inputs)), min(map(len, prefixes))
        input_ids = torch.full((len(inputs), longest), self.eos_token_id)
        mask = torch.zeros_like(input_ids)
        for row, tokens in enumerate(inputs):  # padding on the left, the context, the prefix
            input_ids[row, longest - len(tokens) :] = torch.tensor(tokens)
            mask[row, longest - len(tokens) :] = 1
        generate: Any = self.model.generate  # a decorator hides its type
        output_ids: Tensor = generate(
            input_ids.to(self.model.device),
            attention_mask=mask.to(self.model.device),
            do_sample=False,
            logits_processor=[keep_sampled_token],
            max_new_tokens=length - shortest,
            eos_token_id=list(self.ends),
            pad_token_id=self.eos_token_id,
        ).cpu()
        sequences = [
            row[longest - len(prefix) :] for row, prefix in zip(output_ids, prefixes, strict=True)
        ]
        return pad_rows(sequences, length, self.ends)


def keep_sampled_token(_: Tensor, logits: Tensor) -> Tensor:
    """Sample a token from each row of (n, V) logits, and set the logits of all others to -inf."""
    kept = torch.full_like(logits, -torch.inf)
    return kept.scatter_(1, sample_tokens(logits)[:, None], 0.0)


def _out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out; on CPUs, torch says so only in the message."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return "DefaultCPUAllocator" in str(error)
