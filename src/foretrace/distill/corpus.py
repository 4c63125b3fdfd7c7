"""A corpus of token sequences on disk: shards of equal-length rows, mapped into memory.

A folder holds `corpus.json`, what all shards share, and `shard-000000.safetensors` and so on. Each
shard appears whole or not at all, and carries its own checksum; there is no index to keep in step,
so any number of processes can add shards at once. Rows that end early are padded with end of text.
"""

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
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

    @property
    def token_dtype(self) -> torch.dtype:
        """The narrowest dtype that holds every id."""
        return torch.uint16 if self.vocab_size <= 1 << 16 else torch.uint32


class Shard(NamedTuple):
    """One file of rows."""

    path: Path
    rows: int


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
            path = self.folder / f"shard-{index:06d}.safetensors"
            if self.write_shard(path, tokens):
                return path
            index += 1

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
        narrow = tokens.to(manifest.token_dtype).cpu().contiguous()
        metadata = {"rows": str(len(narrow)), "crc32": str(_checksum(narrow))}
        try:
            _io.write_tensors(path, {"tokens": narrow}, metadata, replace=False)
        except FileExistsError:
            return False
        return True

    def shards(self) -> list[Shard]:
        """List the shards that are there now, in order of name."""
        paths = sorted(self.folder.glob(SHARD_GLOB))
        return [Shard(path, _io.tensor_shape(path, "tokens")[0]) for path in paths]

    def split(self, held_out: int) -> list[Split]:
        """Hold out about `held_out` rows, an even share from the end of every shard."""
        shards = self.shards()
        total = sum(shard.rows for shard in shards)
        if not 0 <= held_out < total:
            raise InvalidInputError(
                f"Cannot hold {held_out} rows out of {self.folder}, which has {total}. Sample "
                f"more, or hold out fewer."
            )
        return [
            Split(shard, min(shard.rows - 1, -(-held_out * shard.rows // total)))
            for shard in shards
        ]

    def read(self, shard: Shard) -> Tensor:
        """Map one shard into memory and check it: (rows, length), narrow ids."""
        tensors, metadata = _io.read_tensors(shard.path)
        tokens = _io.take_tensor(tensors, "tokens", (shard.rows, self.manifest.length), shard.path)
        if metadata.get("crc32") != str(_checksum(tokens)):
            raise InvalidFileError(
                f"{shard.path} is damaged: its checksum does not match. Remove it, or copy it "
                f"again; the other shards are not affected."
            )
        return tokens

    def held_out(self, split: list[Split]) -> Tensor:
        """Read the rows that are held out: (about held_out, length)."""
        kept = [self.read(part.shard)[part.training :].long() for part in split if part.held_out]
        return torch.cat(kept) if kept else torch.empty(0, self.manifest.length, dtype=torch.long)

    def batches(
        self, split: list[Split], batch_size: int, *, seed: int, epoch: int, start: int = 0
    ) -> Iterator[Tensor]:
        """Stream one epoch's training rows in batches: (batch_size, length); the last is smaller.

        Shards are shuffled, and rows within each; the order depends on seed and epoch alone, so
        every process sees the same batches and `start`, in batches, resumes exactly. Memory holds
        one shard at a time.
        """
        order = np.random.default_rng([seed, epoch]).permutation(len(split))
        skip = start * batch_size
        waiting = torch.empty(0, self.manifest.length, dtype=torch.long)
        for number in order:
            part = split[number]
            if skip >= part.training:
                skip -= part.training
                continue
            rows = np.random.default_rng([seed, epoch, number]).permutation(part.training)[skip:]
            skip = 0
            tokens = self.read(part.shard).numpy()
            for first in range(0, len(rows), batch_size):
                chosen = tokens[rows[first : first + batch_size]].astype(np.int64)
                waiting = torch.cat([waiting, torch.from_numpy(chosen)])
                if len(waiting) >= batch_size:
                    yield waiting[:batch_size]
                    waiting = waiting[batch_size:]
        if len(waiting):
            yield waiting


def _checksum(tokens: Tensor) -> int:
    return zlib.crc32(tokens.numpy().data)
