"""Sample a corpus from a language model, shard by shard."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from foretrace.chat import Prompt, is_chat
from foretrace.distill.sampling.corpus import Corpus, Manifest, RowPrompts
from foretrace.distill.sampling.source import Source
from foretrace.errors import InvalidInputError

SHARD_ROWS = 4096


@dataclass(frozen=True)
class SamplingConfig:
    """The size of a corpus, and how its rows begin."""

    sequences: int = 100_000
    length: int = 32
    """Tokens per row, with the tokens of a prompt."""
    prompted: float = 0.5
    """Share of the rows that continue a prompt, if there are prompts."""
    shard_rows: int = SHARD_ROWS
    """Rows per shard. A crash of a worker loses at most one shard."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.sequences < 1 or self.length < 2 or self.shard_rows < 1:
            raise InvalidInputError(
                f"Cannot sample {self.sequences} rows of {self.length} tokens in shards of "
                f"{self.shard_rows}. The minimum is 1, 2 and 1."
            )
        if self.seed < 0:
            raise InvalidInputError(f"The seed must be 0 or more, but is {self.seed}.")
        if not 0 <= self.prompted <= 1:
            raise InvalidInputError(f"prompted must be in [0, 1], but is {self.prompted}.")

    @property
    def shards(self) -> int:
        """The number of shards."""
        return -(-self.sequences // self.shard_rows)

    def rows(self, shard: int) -> int:
        """Return the number of rows of a shard; the last may be smaller."""
        return min(self.shard_rows, self.sequences - shard * self.shard_rows)


def are_chats(prompts: Sequence[Prompt]) -> bool:
    """Return whether all prompts are chats; raise if only some are."""
    chats = sum(map(is_chat, prompts))
    if chats not in (0, len(prompts)):
        raise InvalidInputError(
            f"{chats} of {len(prompts)} prompts are chats, and the others are texts. Distil an HMM "
            f"from either."
        )
    return chats > 0


def open_corpus(
    folder: Path, source: Source, config: SamplingConfig, prompts: Sequence[Prompt]
) -> Corpus:
    """Create the corpus of a source, or open it if it has the same settings."""
    return Corpus.create(
        folder,
        Manifest(
            length=config.length,
            vocab_size=source.vocab_size,
            eos_token_id=source.eos_token_id,
            tokenizer_fingerprint=source.tokenizer_fingerprint,
            source_model=source.name,
            sampling=manifest_settings(config, prompts),
            other_ends=source.ends[1:],
        ),
    )


def manifest_settings(config: SamplingConfig, prompts: Sequence[Prompt]) -> dict[str, object]:
    """Return the sampling settings for the manifest of a corpus."""
    chat = are_chats(prompts)
    texts = [json.dumps(list(map(dict, one))) if is_chat(one) else str(one) for one in prompts]
    return {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "sampling_seed": config.seed,
        "shard_rows": config.shard_rows,
        "prompts": len(prompts),
        "prompts_sha256": sha256("\0".join(texts).encode()).hexdigest(),
        "prompted": 1.0 if chat else config.prompted if prompts else 0.0,
    } | ({"chat": True} if chat else {})


class Sampler:
    """Draws the shards of a corpus. A shard depends on the settings and its number alone."""

    def __init__(
        self, folder: Path, source: Source, config: SamplingConfig, prompts: Sequence[Prompt]
    ) -> None:
        self.source, self.config = source, config
        self.corpus = open_corpus(folder, source, config, prompts)
        self.openings = Openings(source, prompts, config)

    def draw(self, shard: int) -> int:
        """Sample a shard, and write it; return the number of its tokens."""
        contexts, prefixes = zip(*self.openings.for_shard(shard), strict=True)
        seed = _draw_seed(self.config.seed, shard)
        rows = self.source.draw(prefixes, self.config.length, seed, contexts)
        lengths = torch.tensor([len(prefix) for prefix in prefixes])
        chats = RowPrompts(list(contexts), lengths) if self.openings.chat else None
        self.corpus.write_shard(self.corpus.shard_path(shard), rows, chats)
        return rows.numel()


def sample(
    folder: Path,
    source: Source,
    config: SamplingConfig,
    prompts: Sequence[Prompt] = (),
    on_progress: Callable[[int], None] | None = None,
) -> Corpus:
    """Sample the missing shards of a corpus. `on_progress` receives the tokens of each."""
    sampler = Sampler(folder, source, config, prompts)
    for shard in sampler.corpus.missing(config.shards):
        tokens = sampler.draw(shard)
        if on_progress is not None:
            on_progress(tokens)
    return sampler.corpus


class Opening(NamedTuple):
    """How a row begins: the LM reads the context, then the prefix, part of the row."""

    context: list[int]
    prefix: list[int]


class Openings:
    """The openings of the rows of a corpus: prompts, or nothing.

    The context of a text is the token that begins texts. Prompts are cut to half a row, so that the
    LM samples at least half of each row. Every row of a corpus of chats answers one.
    """

    def __init__(self, source: Source, prompts: Sequence[Prompt], config: SamplingConfig) -> None:
        half = config.length // 2
        self.config, self.chat = config, are_chats(prompts)
        self.nothing = Opening([source.eos_token_id], [])
        encoded = source.encode(prompts) if prompts else []
        if self.chat:
            self.prompts = [_split_chat(ids, source.ends, half) for ids in encoded]
        else:
            self.prompts = [
                Opening(self.nothing.context, _cut_at_end(ids[:half], source.eos_token_id))
                for ids in encoded
            ]

    def for_shard(self, shard: int) -> list[Opening]:
        """Choose an opening for each row; the choice depends on the seed and the shard alone."""
        count = self.config.rows(shard)
        if not self.prompts:
            return [self.nothing] * count
        random = np.random.default_rng([self.config.seed, shard])
        prompt_index = random.integers(len(self.prompts), size=count)
        share = 1.0 if self.chat else self.config.prompted
        prompted = random.permutation(count) < round(share * count)
        return [
            self.prompts[index] if has_prompt else self.nothing
            for index, has_prompt in zip(prompt_index, prompted, strict=True)
        ]


def _split_chat(token_ids: list[int], ends: Sequence[int], longest: int) -> Opening:
    """Split a chat after its last end of a turn: there steering begins to read.

    The second part has at most `longest` tokens, and the first has one at least, which predicts the
    first token of the row.
    """
    after_end = 1 + max((i for i, token in enumerate(token_ids) if token in ends), default=0)
    split = max(after_end, len(token_ids) - longest)
    return Opening(token_ids[:split], token_ids[split:])


def _cut_at_end(token_ids: list[int], eos_token_id: int) -> list[int]:
    """Cut a prompt before its first end-of-text token: a row cannot continue after it."""
    return token_ids[: token_ids.index(eos_token_id)] if eos_token_id in token_ids else token_ids


def _draw_seed(seed: int, shard: int) -> int:
    return int(np.random.default_rng([seed, shard, 1]).integers(2**31))
