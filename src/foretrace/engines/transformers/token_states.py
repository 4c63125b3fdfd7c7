"""The hidden states before the tokens of texts, in shards on disk.

A shard is complete or absent, and its name identifies what it is computed from. An interrupted
command therefore continues with the shards that are missing.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from foretrace import _io
from foretrace.engines.prompts import start_ids
from foretrace.engines.transformers.calibration import SteeredRuns, write_openings
from foretrace.engines.transformers.hidden_states import batches, last_states, lm_identity

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MAX_STATES = 60_000  # tokens in all
SAMPLE_TOKENS = 20  # of a sampled text
SAMPLE_PROMPTS, COPIES = 16, 4  # of a shard, and samples that continue each
OnTokens = Callable[[int, int], None]
"""Called with the number of tokens that are done, and of all tokens."""


class StoredStates(NamedTuple):
    """Hidden states before tokens of texts, memory-mapped.

    Attributes:
        shards: The states in the order of the tokens, each (n, d) float16.
        tokens: The token ids, (N,).
        texts: The index of each token's text, (N,).
    """

    shards: list[Tensor]
    tokens: Tensor
    texts: Tensor

    @classmethod
    def of(cls, shards: Sequence["_Shard"]) -> "StoredStates":
        """Join shards."""
        tokens, texts = (torch.cat([one[part] for one in shards]) for part in (1, 2))
        return cls([one.states for one in shards], tokens, texts)

    def rows(self, count: int | None = None) -> list[list[int]]:
        """Return the token ids of each of `count` texts, which may have none."""
        rows: list[list[int]] = [[] for _ in range(count or int(self.texts.max()) + 1)]
        for token, text in zip(self.tokens.tolist(), self.texts.tolist(), strict=True):
            rows[text].append(token)
        return rows


class _Shard(NamedTuple):
    states: Tensor
    tokens: Tensor
    texts: Tensor


class _Folder(NamedTuple):
    """Shards of one kind in a folder."""

    folder: Path
    key: str

    @classmethod
    def of(cls, folder: Path, lm: "PreTrainedModel", *settings: object) -> "_Folder":
        """Name shards by the LM and what they are computed from."""
        content = json.dumps([lm_identity(lm), *settings])
        return cls(folder, hashlib.sha256(content.encode()).hexdigest()[:16])

    def shard(self, number: int, make: Callable[[], _Shard]) -> _Shard:
        """Map a shard into memory, and make it first if it is missing."""
        file = self.folder / f"states-{self.key}-{number:06}.safetensors"
        if not file.exists():
            _io.write_tensors(file, make()._asdict(), {})
        return _Shard(**_io.read_tensors(file)[0])


def read_states(
    lm: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    rows: Sequence[Sequence[int]],
    folder: Path,
    *,
    max_states: int = MAX_STATES,
    seed: int = 0,
    on_progress: OnTokens = lambda done, total: None,
) -> StoredStates:
    """Read the last hidden state before every token of texts.

    Args:
        lm: A causal LM of transformers.
        tokenizer: Its tokenizer.
        rows: The token ids of each text, as continuations.
        folder: The folder of shards.
        max_states: Tokens at most. Texts are chosen at random.
        seed: The random seed.
        on_progress: Called after every batch.

    Returns:
        The states of the chosen texts.
    """
    order = np.random.default_rng(seed).permutation(len(rows))
    ends = np.cumsum([len(rows[text]) for text in order])
    chosen = order[: max(1, int((ends <= max_states).sum()))].tolist()
    texts, start = [rows[text] for text in chosen], start_ids(tokenizer)
    stored = _Folder.of(folder, lm, "read", start, texts)
    total, done, shards = sum(map(len, texts)), 0, []
    for number, batch in enumerate(batches(texts, start)):
        lengths = [len(texts[text]) for text in batch.texts]

        def make(ids: Tensor = batch.ids, lengths: list[int] = lengths) -> _Shard:
            states = last_states(lm, ids)[:, len(start) - 1 :]
            return _kept(states, ids[:, len(start) :], lengths)

        shard = stored.shard(number, make)
        index = torch.tensor([chosen[text] for text in batch.texts])
        shards.append(shard._replace(texts=index[shard.texts]))
        done += sum(lengths)
        on_progress(done, total)
    return StoredStates.of(shards)


def sample_states(
    lm: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[Sequence[int]],
    ends: Sequence[int],
    folder: Path,
    *,
    max_states: int = MAX_STATES,
    seed: int = 0,
    on_progress: OnTokens = lambda done, total: None,
) -> StoredStates:
    """Sample continuations at temperature 1, and keep the state before every token.

    Args:
        lm: A causal LM of transformers.
        tokenizer: Its tokenizer.
        prompts: Token ids of each prompt. Without prompts, the LM writes openings.
        ends: Tokens that end a text. They are not part of it.
        folder: The folder of shards.
        max_states: Tokens at most.
        seed: The random seed.
        on_progress: Called after every batch.

    Returns:
        The states of the continuations, whose index says when they were sampled.
    """
    size = SAMPLE_PROMPTS * COPIES
    count = -(-max_states // (size * SAMPLE_TOKENS))
    stored = _Folder.of(folder, lm, "sample", [*map(list, prompts)], list(ends), seed)
    shards = []
    for number in range(count):
        batch_seed = int(np.random.SeedSequence([seed, number]).generate_state(1)[0])

        def make(seed: int = batch_seed) -> _Shard:
            return _sample(lm, _prompts(lm, tokenizer, prompts, ends, seed), ends, seed)

        shard = stored.shard(number, make)
        shards.append(shard._replace(texts=shard.texts + number * size))
        on_progress((number + 1) * size * SAMPLE_TOKENS, count * size * SAMPLE_TOKENS)
    return StoredStates.of(shards)


def _prompts(
    lm: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[Sequence[int]],
    ends: Sequence[int],
    seed: int,
) -> list[list[int]]:
    """Choose prompts at random; without any, let the LM write openings."""
    if not prompts:
        start = start_ids(tokenizer, ends)
        return write_openings(lm, start, ends=ends, count=SAMPLE_PROMPTS, seed=seed)
    repeats = len(prompts) < SAMPLE_PROMPTS
    chosen = np.random.default_rng(seed).choice(len(prompts), SAMPLE_PROMPTS, replace=repeats)
    return [list(prompts[index]) for index in chosen]


def _sample(
    lm: "PreTrainedModel", prompts: Sequence[Sequence[int]], ends: Sequence[int], seed: int
) -> _Shard:
    """Sample continuations of prompts, and keep what the head reads at every step."""
    states: list[Tensor] = []
    hook = lm.get_output_embeddings().register_forward_pre_hook(
        lambda _head, inputs: states.append(inputs[0][:, -1])
    )
    with hook:
        settings: dict[str, Any] = {
            "ends": ends,
            "copies": COPIES,
            "max_new_tokens": SAMPLE_TOKENS,
            "seed": seed,
        }
        drawn = SteeredRuns(lm, prompts, **settings).draw(None)
    states[0] = states[0].repeat_interleave(COPIES, 0)  # the prompts are read once
    rows = [[token for token in row.tokens if token not in ends] for row in drawn]
    ids = torch.zeros(len(rows), len(states), dtype=torch.long)
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.long)
    return _kept(torch.stack(states, 1), ids, [len(tokens) for tokens in rows])


def _kept(states: Tensor, ids: Tensor, lengths: Sequence[int]) -> _Shard:
    """Keep the first positions of each row: (n, T or more, d) and (n, T) -> (N, d), (N,)."""
    kept = torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]
    values = states[:, : ids.shape[1]].half().cpu()[kept]
    return _Shard(values, ids[kept].int(), kept.nonzero()[:, 0].int())


def remove_states(folder: Path) -> None:
    """Remove the shards of a folder, and the folder if it has nothing else."""
    for file in [*folder.glob("states-*.safetensors"), *folder.glob(".states-*.partial")]:
        file.unlink(missing_ok=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
