"""Sample text, and compute hidden states, with transformers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from foretrace._hardware import default_dtype
from foretrace.distill.sampling.source import (
    Source,
    TokenLists,
    find_ends,
    load_tokenizer_and_model,
    pad_rows,
    public_name,
    sample_tokens,
)
from foretrace.errors import InvalidInputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class TransformersSource(Source):
    """Samples with transformers' `generate`, in batches that shrink when memory runs out."""

    model: "PreTrainedModel"
    batch_size: int = 256

    @property
    def vocab_size(self) -> int:
        """The number of tokens that the language model can emit."""
        return int(self.model.config.get_text_config().vocab_size)

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
        return cls(public_name(name), tokenizer, ends, model.eval())

    def draw(
        self, prefixes: TokenLists, length: int, seed: int, contexts: TokenLists | None = None
    ) -> Tensor:
        """Continue each prefix to `length` tokens: (n, length)."""
        torch.manual_seed(seed)
        contexts = self.contexts_or_start(contexts, len(prefixes))
        rows = torch.empty(len(prefixes), length, dtype=torch.long)
        # Group prefixes of similar length: the shortest prefix decides how many tokens all rows of
        # a batch generate.
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

    def hidden(self, rows: Tensor, contexts: TokenLists | None = None) -> Tensor:
        """Compute the last layer's hidden states of (n, T) rows: (n, T + 1, d)."""
        contexts = self.contexts_or_start(contexts, len(rows))
        batches = self._in_batches(
            range(len(rows)),
            lambda batch: self._hidden(rows[batch], [contexts[row] for row in batch]),
        )
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
    def _hidden(self, rows: Tensor, contexts: TokenLists) -> Tensor:
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
    def _continue(self, contexts: TokenLists, prefixes: TokenLists, length: int) -> Tensor:
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
