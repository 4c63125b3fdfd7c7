"""A corpus of token sequences on disk: shards of equal-length rows, mapped into memory.

A folder holds `corpus.json`, what all shards share, and `shard-000000.safetensors` and so on. Each
shard appears whole or not at all, and carries its own checksum; there is no index to keep in step,
so any number of processes can add shards at once. Rows that end early are padded with end of text.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from foretrace import _io
from foretrace.errors import InvalidFileError, InvalidInputError

FORMAT_VERSION = 1
MANIFEST_FILE = "corpus.json"
SHARD_GLOB = "shard-*.safetensors"


@dataclass(frozen=True)
class Manifest:
    """What all shards of a corpus share."""

    length: int
    """Tokens in every row."""
    vocab_size: int
    eos_token_id: int | None = None
    """Ends a text, and pads the rest of its row."""
    tokenizer_fingerprint: str | None = None
    source_model: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """How the rows were drawn."""

    def __post_init__(self) -> None:
        if self.length < 1 or self.vocab_size < 1:
            raise InvalidInputError(
                f"A corpus needs rows of at least 1 token and a vocabulary, but length is "
                f"{self.length} and vocab_size {self.vocab_size}."
            )
        if self.eos_token_id is not None and not 0 <= self.eos_token_id < self.vocab_size:
            raise InvalidInputError(
                f"eos_token_id is {self.eos_token_id}, but the vocabulary ends at "
                f"{self.vocab_size - 1}."
            )

    @property
    def token_dtype(self) -> torch.dtype:
        """The narrowest dtype that holds every id."""
        return torch.uint16 if self.vocab_size <= 1 << 16 else torch.uint32


class Shard(NamedTuple):
    """One file of rows."""

    path: Path
    rows: int
    crc32: str


class Split(NamedTuple):
    """How many rows, from the end of each shard, are held out of training."""

    shard: Shard
    held_out: int

    @property
    def training(self) -> int:
        """Rows that are left to train on."""
        return self.shard.rows - self.held_out


class Corpus:
    """Token sequences in a folder. Open one, or `Corpus.create` it; then `append` and read."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        path = self.folder / MANIFEST_FILE
        content = _io.read_json(path)
        if content.pop("format_version", None) != FORMAT_VERSION:
            raise InvalidFileError(
                f"{path} is not of format version {FORMAT_VERSION}. Upgrade foretrace, or sample "
                f"the corpus again."
            )
        known = {entry.name for entry in fields(Manifest)}
        try:
            self.manifest = Manifest(**{key: content[key] for key in known & content.keys()})
        except TypeError as error:
            raise InvalidFileError(f"{path} cannot be read ({error}). Make it again.") from error

    @classmethod
    def create(cls, folder: str | os.PathLike[str], manifest: Manifest) -> Self:
        """Make an empty corpus, or open the one that is there if it has the same manifest."""
        path = Path(folder) / MANIFEST_FILE
        if not path.exists():
            _io.write_json(path, {"format_version": FORMAT_VERSION, **asdict(manifest)})
        corpus = cls(folder)
        if asdict(corpus.manifest) != json.loads(json.dumps(asdict(manifest))):
            theirs, ours = asdict(corpus.manifest), asdict(manifest)
            differing = ", ".join(key for key in ours if ours[key] != theirs[key])
            raise InvalidFileError(
                f"{folder} holds a corpus of another kind: {differing} differ. Use the same "
                f"settings, or another folder."
            )
        return corpus

    def append(self, tokens: Tensor) -> Path:
        """Add (rows, length) token ids as the next shard; safe beside other processes."""
        index = len(list(self.folder.glob(SHARD_GLOB)))
        while True:
            path = self.shard_path(index)
            if self.write_shard(path, tokens):
                return path
            index += 1

    def shard_path(self, index: int) -> Path:
        """Name the shard of a number."""
        return self.folder / f"shard-{index:06d}.safetensors"

    def write_shard(self, path: Path, tokens: Tensor) -> bool:
        """Write one shard under a given name; False, and nothing done, if it is there already."""
        manifest = self.manifest
        if tokens.dim() != 2 or tokens.shape[1] != manifest.length or not len(tokens):
            raise InvalidInputError(
                f"A shard must have the shape (rows, {manifest.length}), but has "
                f"{tuple(tokens.shape)}."
            )
        low, high = (int(bound) for bound in tokens.long().aminmax())
        if low < 0 or high >= manifest.vocab_size:
            raise InvalidInputError(
                f"Token ids run from {low} to {high}, but the corpus has a vocabulary of "
                f"{manifest.vocab_size}. Was another tokenizer used?"
            )
        if manifest.eos_token_id is not None:
            ended = (tokens == manifest.eos_token_id).cumsum(1) > 0
            if bool((ended & (tokens != manifest.eos_token_id)).any()):
                raise InvalidInputError(
                    f"Some rows go on after end of text ({manifest.eos_token_id}). Pad with it "
                    f"what follows; if it also begins texts, leave that first token out."
                )
        narrow = tokens.to(manifest.token_dtype).cpu().contiguous()
        metadata = {"crc32": str(_io.checksum(narrow))}
        try:
            _io.write_tensors(path, {"tokens": narrow}, metadata, replace=False)
        except FileExistsError:
            return False
        return True

    def shards(self) -> list[Shard]:
        """List the shards that are there now, in order of name."""
        found = []
        for path in sorted(self.folder.glob(SHARD_GLOB)):
            shape, metadata = _io.read_header(path, "tokens")
            found.append(Shard(path, shape[0], metadata.get("crc32", "")))
        return found

    def split(self, held_out: int) -> list[Split]:
        """Hold out `held_out` rows, an even share from the end of every shard."""
        shards = self.shards()
        total = sum(shard.rows for shard in shards)
        if not 0 <= held_out < total:
            raise InvalidInputError(
                f"Cannot hold {held_out} rows out of {self.folder}, which has {total}. Sample "
                f"more, or hold out fewer."
            )
        ends = list(accumulate(shard.rows for shard in shards))
        due = [held_out * end // total for end in [0, *ends]]  # so many by the end of each shard
        return [
            Split(shard, after - before)
            for shard, before, after in zip(shards, due[:-1], due[1:], strict=True)
        ]

    def read(self, shard: Shard) -> Tensor:
        """Map one shard into memory and check it: (rows, length), narrow ids."""
        tokens = self._open(shard)
        if shard.crc32 != str(_io.checksum(tokens)):
            raise InvalidFileError(
                f"{shard.path} is damaged: its checksum does not match. Remove it, or copy it "
                f"again; the other shards are not affected."
            )
        return tokens

    def _open(self, shard: Shard) -> Tensor:
        tensors, _ = _io.read_tensors(shard.path)
        return _io.take_tensor(tensors, "tokens", (shard.rows, self.manifest.length), shard.path)

    def held_out(self, split: list[Split]) -> Tensor:
        """Read the rows that are held out, and only those: (held_out, length)."""
        kept = [self._open(part.shard)[part.training :].long() for part in split if part.held_out]
        return torch.cat(kept) if kept else torch.empty(0, self.manifest.length, dtype=torch.long)

    def batches(
        self,
        split: list[Split],
        batch_size: int,
        *,
        seed: int,
        epoch: int,
        start: int = 0,
        part: tuple[int, int] = (0, 1),
    ) -> Iterator[Tensor]:
        """Stream one epoch's training rows in batches, as equal as they can be: (n, length).

        Shards are shuffled, and rows within each; the order depends on seed and epoch alone, so
        that every process sees the same batches and `start`, in batches, resumes exactly. With
        `part` = (rank, size), a process reads every size-th row of each batch, from its rank on.
        Memory holds one shard at a time.
        """
        sizes = _equal_sizes(sum(each.training for each in split), batch_size)
        waiting, taken = sum(sizes[:start]), 0  # rows to skip; rows of the current batch so far
        rank, size = part
        rows: list[Tensor] = []
        for number in np.random.default_rng([seed, epoch]).permutation(len(split)):
            shard, training = split[number].shard, split[number].training
            first, waiting = min(waiting, training), max(0, waiting - training)
            if first == training:
                continue
            order = np.random.default_rng([seed, epoch, number]).permutation(training)
            tokens = self.read(shard).numpy()
            while first < training:
                more = min(training - first, sizes[start] - taken)
                mine = order[first + (rank - taken) % size : first + more : size]
                rows.append(torch.from_numpy(tokens[mine].astype(np.int64)))
                first, taken = first + more, taken + more
                if taken == sizes[start]:
                    yield torch.cat(rows)
                    start, taken, rows = start + 1, 0, []


def _equal_sizes(rows: int, batch_size: int) -> list[int]:
    """Cut rows into batches of at most `batch_size` whose sizes differ by at most 1.

    A small last batch would weigh as much in training as the others, and spoil them.
    """
    count = -(-rows // batch_size)
    return [rows * (n + 1) // count - rows * n // count for n in range(count)]
