"""Sample text, and compute hidden states, with llama.cpp."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from foretrace.distill.sampling.source import (
    Source,
    TokenLists,
    find_ends,
    pad_rows,
    public_name,
    sample_tokens,
)
from foretrace.errors import InvalidInputError
from foretrace.gguf import GGUFTokenizer, load_llama

if TYPE_CHECKING:
    from llama_cpp import Llama
    from transformers import PreTrainedTokenizerBase

SEQUENCES = 64  # that are sampled at once
CHAT_TOKENS = 512  # of the prompt of a chat, on average
CALL_TOKENS = 512  # that llama.cpp computes in one call


class Position(NamedTuple):
    """A token to compute, and whether its output is read."""

    sequence: int
    position: int
    token: int
    is_read: bool


@dataclass
class LlamaSource(Source):
    """Samples with llama.cpp, several sequences at once, from a GGUF file."""

    llm: "Llama"
    batch_size: int = SEQUENCES

    def __post_init__(self) -> None:
        import llama_cpp

        self._api: Any = llama_cpp
        self._batch = llama_cpp.llama_batch_init(CALL_TOKENS, 0, 1)

    @property
    def vocab_size(self) -> int:
        """The number of tokens that the language model can emit."""
        return int(self.llm.n_vocab())

    @classmethod
    def load(
        cls,
        file: str,
        length: int,
        *,
        end_of_text_token: str | None = None,
        chat: bool = False,
        device: str = "cpu",
        **options: Any,
    ) -> "LlamaSource":
        """Load a GGUF file for rows of `length` tokens; `options` go to `llama_cpp.Llama`."""
        import llama_cpp

        context = SEQUENCES * (length + (CHAT_TOKENS if chat else 1))
        settings = {
            "n_ctx": context,
            "n_batch": CALL_TOKENS,
            "n_gpu_layers": 0 if device == "cpu" else -1,
            # A context for embeddings also takes several sequences.
            "embedding": True,
            "pooling_type": llama_cpp.LLAMA_POOLING_TYPE_NONE,
        }
        llm = load_llama(file, **settings | options)
        tokenizer = GGUFTokenizer(llm)
        alias = cast("PreTrainedTokenizerBase", tokenizer)  # it has the methods in use
        ends = find_ends(alias, end_of_text_token, chat=chat, model_ends=tokenizer.end_token_ids)
        return cls(public_name(file), alias, ends, llm)

    def draw(
        self, prefixes: TokenLists, length: int, seed: int, contexts: TokenLists | None = None
    ) -> Tensor:
        """Continue each prefix to `length` tokens: (n, length)."""
        torch.manual_seed(seed)
        contexts = self.contexts_or_start(contexts, len(prefixes))
        rows = torch.empty(len(prefixes), length, dtype=torch.long)
        sizes = [len(context) + length for context in contexts]
        for group in self._groups(sizes):
            rows[group] = self._continue(
                [list(contexts[row]) for row in group],
                [list(prefixes[row]) for row in group],
                length,
            )
        return rows

    def openings(
        self, start: Sequence[int], count: int, length: int, seed: int
    ) -> Iterator[Tensor]:
        """Begin texts after `start`; yield the logits of each of their tokens, (count, V).

        Tokens that end a text do not occur.
        """
        torch.manual_seed(seed)
        self._clear()
        last = len(start) - 1
        positions = [
            Position(row, index, token, index == last)
            for row in range(count)
            for index, token in enumerate(start)
        ]
        for step in range(length):
            logits = self._compute(positions)
            logits[:, list(self.ends)] = -torch.inf
            yield logits
            positions = [
                Position(row, len(start) + step, int(token), True)
                for row, token in enumerate(sample_tokens(logits))
            ]

    def hidden(self, rows: Tensor, contexts: TokenLists | None = None) -> Tensor:
        """Compute the last layer's hidden states of (n, T) rows: (n, T + 1, d)."""
        contexts = self.contexts_or_start(contexts, len(rows))
        length = rows.shape[1] + 1
        hidden = torch.empty(len(rows), length, self.llm.n_embd())
        for group in self._groups([len(context) + length - 1 for context in contexts]):
            positions = [
                Position(sequence, index, token, index >= len(contexts[row]) - 1)
                for sequence, row in enumerate(group)
                for index, token in enumerate([*contexts[row], *rows[row].tolist()])
            ]
            self._clear()
            states = self._compute(positions, hidden_states=True)
            hidden[group] = states.view(len(group), length, -1)
        return hidden

    def close(self) -> None:
        """Free the model and its memory."""
        self._api.llama_batch_free(self._batch)
        self.llm.close()

    def _groups(self, sizes: Sequence[int]) -> Iterator[list[int]]:
        """Divide sequences of so many tokens into groups that fit the context."""
        group: list[int] = []
        used, room = 0, self.llm.n_ctx()
        for row, size in enumerate(sizes):
            if size > room:
                raise InvalidInputError(
                    f"A sequence of {size} tokens, with its prompt, does not fit the context of "
                    f"{room} tokens. Pass --engine-options '{{\"n_ctx\": {size}}}'."
                )
            if used + size > room or len(group) == self.batch_size:
                yield group
                group, used = [], 0
            group.append(row)
            used += size
        if group:
            yield group

    def _continue(
        self, contexts: list[list[int]], prefixes: list[list[int]], length: int
    ) -> Tensor:
        """Continue one group of prefixes: (n, length)."""
        rows = prefixes
        running = [row for row, prefix in enumerate(rows) if len(prefix) < length]
        positions = [
            Position(row, index, token, index == len(contexts[row]) + len(rows[row]) - 1)
            for row in running
            for index, token in enumerate([*contexts[row], *rows[row]])
        ]
        self._clear()
        while running:
            for row, token in zip(running, sample_tokens(self._compute(positions)), strict=True):
                rows[row].append(int(token))
            running = [
                row for row in running if len(rows[row]) < length and rows[row][-1] not in self.ends
            ]
            positions = [
                Position(row, len(contexts[row]) + len(rows[row]) - 1, rows[row][-1], True)
                for row in running
            ]
        return pad_rows([torch.tensor(row) for row in rows], length, self.ends)

    def _clear(self) -> None:
        self._api.llama_memory_clear(self._api.llama_get_memory(self.llm.ctx), True)

    def _compute(self, positions: Sequence[Position], *, hidden_states: bool = False) -> Tensor:
        """Compute tokens; return the logits or hidden states of the tokens that are read."""
        api, context = self._api, self.llm.ctx
        api.llama_set_embeddings(context, hidden_states)
        read = api.llama_get_embeddings_ith if hidden_states else api.llama_get_logits_ith
        width = self.llm.n_embd() if hidden_states else self.vocab_size
        outputs = torch.empty(sum(one.is_read for one in positions), width)
        filled = 0
        for start in range(0, len(positions), CALL_TOKENS):
            call = positions[start : start + CALL_TOKENS]
            # With hidden states, llama.cpp wants every token to have an output.
            self._fill_batch(call, all_outputs=hidden_states)
            if code := api.llama_decode(context, self._batch):
                raise RuntimeError(f"llama_decode returned {code}")
            for index, one in enumerate(call):
                if one.is_read:
                    row = np.ctypeslib.as_array(read(context, index), shape=(width,))
                    outputs[filled] = torch.from_numpy(row)
                    filled += 1
        return outputs

    def _fill_batch(self, positions: Sequence[Position], *, all_outputs: bool) -> None:
        batch = self._batch
        batch.n_tokens = len(positions)
        for index, one in enumerate(positions):
            batch.token[index], batch.pos[index] = one.token, one.position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, one.sequence
            batch.logits[index] = one.is_read or all_outputs
