"""Drawing a corpus from a language model, by as many processes as care to join in."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np

from foretrace.distill.sampling.corpus import Corpus, Manifest
from foretrace.distill.sampling.source import Source
from foretrace.distill.sampling.work_claims import share
from foretrace.errors import InvalidInputError

SHARD_ROWS = 4096


@dataclass(frozen=True)
class SamplingConfig:
    """What to draw."""

    sequences: int = 100_000
    length: int = 32
    """Tokens in a row, a prompt's included."""
    prompted: float = 0.5
    """Share of the rows that continue a prompt, if there are prompts; the others begin a text."""
    shard_rows: int = SHARD_ROWS
    """Rows in a shard: what a worker claims at once, and what a crash loses at most."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.sequences < 1 or self.length < 2 or self.shard_rows < 1:
            raise InvalidInputError(
                f"Cannot draw {self.sequences} rows of {self.length} tokens in shards of "
                f"{self.shard_rows}: give at least 1, 2 and 1."
            )
        if self.seed < 0:
            raise InvalidInputError(f"The seed must be 0 or more, but is {self.seed}.")
        if not 0 <= self.prompted <= 1:
            raise InvalidInputError(f"prompted is a share, in [0, 1], but is {self.prompted}.")

    @property
    def shards(self) -> int:
        """How many shards that makes."""
        return -(-self.sequences // self.shard_rows)

    def rows(self, shard: int) -> int:
        """How many rows a shard has; the last has what is left."""
        return min(self.shard_rows, self.sequences - shard * self.shard_rows)


def open_corpus(
    folder: Path, source: Source, config: SamplingConfig, prompts: Sequence[str]
) -> Corpus:
    """Make the corpus for a source, or open it if it was begun with the same settings."""
    return Corpus.create(
        folder,
        Manifest(
            length=config.length,
            vocab_size=source.vocab_size,
            eos_token_id=source.eos_token_id,
            tokenizer_fingerprint=source.tokenizer_fingerprint,
            source_model=source.name,
            sampling=manifest_settings(config, prompts),
        ),
    )


def manifest_settings(config: SamplingConfig, prompts: Sequence[str]) -> dict[str, object]:
    """Say how rows are drawn, as it stands in a corpus's manifest."""
    return {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "sampling_seed": config.seed,
        "shard_rows": config.shard_rows,
        "prompts": len(prompts),
        "prompts_sha256": sha256("\0".join(prompts).encode()).hexdigest(),
        "prompted": config.prompted if prompts else 0.0,
    }


def sample(
    folder: Path,
    source: Source,
    config: SamplingConfig,
    prompts: Sequence[str] = (),
    observe: Callable[[int], None] | None = None,
) -> Corpus:
    """Draw what is not drawn yet, shard by shard, beside any other worker on the same folder.

    Shards are numbered, and each is claimed before it is drawn: whoever crashes leaves a claim that
    others take over. Returns when the corpus is whole. `observe` is told how many rows this worker
    has added.
    """
    corpus = open_corpus(folder, source, config, prompts)
    begin = Beginnings(source, prompts, config)

    def draw(shard: int, path: Path) -> None:
        drawn = source.draw(begin.of(shard), config.length, seed=_seed(config.seed, shard))
        corpus.write_shard(path, drawn)
        if observe is not None:
            observe(len(drawn))

    share([corpus.shard_path(shard) for shard in range(config.shards)], draw)
    return corpus


class Beginnings:
    """What rows begin with: a prompt, or nothing.

    Prompts longer than half a row are cut there: the other half is for the LM.
    """

    def __init__(self, source: Source, prompts: Sequence[str], config: SamplingConfig) -> None:
        half = config.length // 2
        self.config = config
        encoded = source.encode(prompts) if prompts else []
        self.prompts = [_up_to(ids[:half], source.eos_token_id) for ids in encoded]

    def of(self, shard: int) -> list[list[int]]:
        """Choose for each row of a shard; the choice depends on the seed and the shard alone."""
        count = self.config.rows(shard)
        if not self.prompts:
            return [[] for _ in range(count)]
        random = np.random.default_rng([self.config.seed, shard])
        chosen = random.integers(len(self.prompts), size=count)
        prompted = random.permutation(count) < round(self.config.prompted * count)
        return [
            self.prompts[which] if given else []
            for which, given in zip(chosen, prompted, strict=True)
        ]


def _up_to(ids: list[int], end: int) -> list[int]:
    """Cut a prompt where it says that it ends: what follows could not be part of the row."""
    return ids[: ids.index(end)] if end in ids else ids


def _seed(seed: int, shard: int) -> int:
    return int(np.random.default_rng([seed, shard, 1]).integers(2**31))
