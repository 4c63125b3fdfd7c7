"""Drawing text, and reading hidden states, through transformers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foretrace.distill.sampling.source import encode, end_of_text, load_both, padded, public_name
from foretrace.errors import InvalidInputError
from foretrace.vocabulary import fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


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
        self.vocab_size = int(self.model.config.get_text_config().vocab_size)
        self.tokenizer_fingerprint = fingerprint(self.tokenizer.get_vocab())

    @property
    def width(self) -> int:
        """How many sequences are drawn at once."""
        return self.batch_size

    @classmethod
    def load(
        cls, name: str, *, end_of_text_token: str | None = None, **options: Any
    ) -> "TransformersSource":
        """Load a model by folder or hub id; `options` go to `from_pretrained`."""
        from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

        tokenizer, model = load_both(
            name, AutoTokenizer, partial(AutoModelForCausalLM.from_pretrained, name), options
        )
        # A model may bring its own taste, a repetition penalty say: that is not the LM's
        # distribution, and `generate` would fill in what we do not set.
        model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
        return cls(
            public_name(name), model.eval(), tokenizer, end_of_text(tokenizer, end_of_text_token)
        )

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Turn texts into token ids, without special tokens."""
        return encode(self.tokenizer, texts)

    def draw(self, prefixes: Sequence[Sequence[int]], length: int, seed: int) -> Tensor:
        """Continue each prefix to `length` tokens: (n, length)."""
        torch.manual_seed(seed)
        rows = torch.empty(len(prefixes), length, dtype=torch.long)
        # Prefixes of like length go together: what the shortest needs, the others throw away.
        order = sorted(range(len(prefixes)), key=lambda row: len(prefixes[row]))
        for batch, drawn in self._in_batches(
            order, lambda batch: self._continue([prefixes[row] for row in batch], length)
        ):
            rows[batch] = drawn
        return rows

    def hidden(self, rows: Tensor) -> Tensor:
        """Read (n, T) rows and give the last hidden states around each token: (n, T + 1, d).

        The one at t predicts token t; the one at t + 1 has read it.
        """
        parts = self._in_batches(range(len(rows)), lambda batch: self._read(rows[batch]))
        return torch.cat([part for _, part in parts])

    def _in_batches(
        self, rows: Sequence[int], work: Callable[[list[int]], Tensor]
    ) -> Iterator[tuple[list[int], Tensor]]:
        """Work on rows batch by batch; where memory runs out, go on with half the batch."""
        waiting = list(rows)
        while waiting:
            batch = waiting[: self.batch_size]
            try:
                done = work(batch)
            except (RuntimeError, MemoryError) as error:
                if not _out_of_memory(error):
                    raise
                self._shrink(error)
                continue
            yield batch, done
            waiting = waiting[len(batch) :]

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
        """Let go of the model."""
        del self.model
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def _read(self, rows: Tensor) -> Tensor:
        begun = torch.nn.functional.pad(rows.long(), (1, 0), value=self.eos_token_id)
        found: Tensor = self.model.base_model(begun.to(self.model.device)).last_hidden_state
        return found.cpu()

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
            do_sample=False,
            logits_processor=[drawn_by_chance],
            max_new_tokens=length - shortest,
            eos_token_id=self.eos_token_id,
            pad_token_id=self.eos_token_id,
        ).cpu()
        texts = [
            row[longest + 1 - len(prefix) :] for row, prefix in zip(drawn, prefixes, strict=True)
        ]
        return padded(texts, length, self.eos_token_id)


def drawn_by_chance(_: Tensor, logits: Tensor) -> Tensor:
    """Draw from the LM as it is, by one number a row; what is drawn is all that is left: (n, V).

    `generate` would draw one for every token of the vocabulary, which on CPUs takes as long as a
    small LM itself.
    """
    sums = logits.float().softmax(-1).cumsum(-1, dtype=torch.float64)
    chance = torch.rand(len(logits), 1, dtype=torch.float64, device=logits.device)
    token = torch.searchsorted(sums, chance * sums[:, -1:], right=True)
    chosen = torch.full_like(logits, -torch.inf)
    return chosen.scatter_(1, token.clamp_max_(logits.shape[1] - 1), 0.0)


def _out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out; on the CPU, torch says so in words alone."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return "DefaultCPUAllocator" in str(error)
