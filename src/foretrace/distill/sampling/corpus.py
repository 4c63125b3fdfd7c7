"""A corpus of token sequences on disk: shards of equal-length rows, mapped into memory.

A folder holds `corpus.json`, the manifest, and `shard-000000.safetensors` and so on. A shard is
written atomically and carries its own checksum. There is no index to keep consistent, so any number
of processes can add shards at once. Rows that end early are padded with the end-of-text token.
A shard of answers in chats also holds what the language model read before each row.
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

from foretrace import _io, _remote
from foretrace.errors import InvalidFileError, InvalidInputError

FORMAT_VERSION = 1
MANIFEST_FILE = "corpus.json"
SHARD_GLOB = "shard-*.safetensors"


@dataclass(frozen=True)
class Manifest:
    """The properties that all shards of a corpus share.

    Attributes:
        length: Tokens per row.
        vocab_size: The size of the vocabulary.
        eos_token_id: The token that ends a text and pads the rest of its row; None if texts do not
            end.
        other_ends: Further tokens that end a text. Rows hold `eos_token_id` in their place.
        tokenizer_fingerprint: The `foretrace.fingerprint` of the vocabulary.
        source_model: The language model that the rows were sampled from.
        sampling: The settings that the rows were sampled with.

    Raises:
        InvalidInputError: If the length, the vocabulary or the end-of-text token is out of range.

    Example:
        >>> from foretrace.distill import Manifest
        >>> Manifest(length=32, vocab_size=50_257, eos_token_id=50_256).token_dtype
        torch.uint16
    """

    length: int
    vocab_size: int
    eos_token_id: int | None = None
    tokenizer_fingerprint: str | None = None
    source_model: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    other_ends: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "other_ends", tuple(self.other_ends))
        if self.length < 1 or self.vocab_size < 1:
            raise InvalidInputError(
                f"A corpus needs rows of at least 1 token and a vocabulary, but length is "
                f"{self.length} and vocab_size {self.vocab_size}."
            )
        if self.other_ends and self.eos_token_id is None:
            raise InvalidInputError("A corpus with other_ends needs an eos_token_id.")
        for token in self.eos_token_ids:
            if not 0 <= token < self.vocab_size:
                raise InvalidInputError(
                    f"eos_token_id is {token}, but the vocabulary ends at {self.vocab_size - 1}."
                )

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All tokens that end a text."""
        return () if self.eos_token_id is None else (self.eos_token_id, *self.other_ends)

    @property
    def token_dtype(self) -> torch.dtype:
        """The narrowest dtype that holds every token id."""
        return torch.uint16 if self.vocab_size <= 1 << 16 else torch.uint32


class RowPrompts(NamedTuple):
    """The prompts of rows.

    Attributes:
        contexts: The tokens that the language model read before each row.
        lengths: How many tokens at the beginning of each row belong to its prompt: (rows,).
    """

    contexts: list[list[int]]
    lengths: Tensor

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors to store, with token ids of this dtype."""
        tokens = [token for context in self.contexts for token in context]
        return {
            "contexts": torch.tensor(tokens, dtype=torch.long).to(dtype),
            "context_lengths": torch.tensor([len(context) for context in self.contexts]),
            "prompt_lengths": self.lengths.long(),
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Read the tensors of a shard."""
        sizes = tensors["context_lengths"].tolist()
        contexts = torch.split(tensors["contexts"].long(), sizes)
        return cls([context.tolist() for context in contexts], tensors["prompt_lengths"])


class Shard(NamedTuple):
    """One file of rows."""

    path: Path
    rows: int
    crc32: str


class ShardSplit(NamedTuple):
    """The split of a shard into training rows and, at its end, held-out rows."""

    shard: Shard
    held_out_rows: int

    @property
    def training_rows(self) -> int:
        """The number of rows to train on."""
        return self.shard.rows - self.held_out_rows


class Corpus:
    """Token sequences in a folder.

    Open a corpus by its folder, or make one by `Corpus.create`. Then `append` rows, and read them.

    Args:
        folder: A folder that holds a corpus.

    Attributes:
        folder: The folder.
        manifest: The properties that all shards share.

    Raises:
        InvalidFileError: If the manifest is missing, damaged or of another format version.

    Example:
        >>> from foretrace.distill import Corpus, Manifest
        >>> corpus = Corpus.create(folder / "corpus", Manifest(length=3, vocab_size=10))
        >>> corpus.append(torch.tensor([[1, 2, 3], [4, 5, 6]])).name
        'shard-000000.safetensors'
        >>> [shard.rows for shard in Corpus(folder / "corpus").shards()]
        [2]
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = _remote.to_path(folder)
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
            raise InvalidFileError(
                f"{path} cannot be read ({error}). Sample the corpus again."
            ) from error

    @classmethod
    def create(cls, folder: str | os.PathLike[str], manifest: Manifest) -> Self:
        """Create an empty corpus, or open the existing one if it has the same manifest.

        Args:
            folder: The folder of the corpus; it is created if it does not exist.
            manifest: The properties that all shards share.

        Returns:
            The corpus.

        Raises:
            InvalidFileError: If the folder holds a corpus with another manifest.
        """
        path = _remote.to_path(folder) / MANIFEST_FILE
        if not path.exists():
            _io.write_json(path, {"format_version": FORMAT_VERSION, **asdict(manifest)})
        corpus = cls(folder)
        existing, wanted = (
            json.loads(json.dumps(asdict(content))) for content in (corpus.manifest, manifest)
        )
        if existing != wanted:
            differing = ", ".join(key for key in wanted if wanted[key] != existing[key])
            raise InvalidFileError(
                f"{folder} holds another corpus: {differing} differ. Use the same settings, or "
                f"another folder."
            )
        return corpus

    def append(self, tokens: Tensor) -> Path:
        """Write rows as the next shard. Several processes can append at once.

        Args:
            tokens: Token ids, (rows, length).

        Returns:
            The path of the shard.

        Raises:
            InvalidInputError: If the shape is wrong, a token id is out of range, or a row continues
                after the end-of-text token.
        """
        index = len(list(self.folder.glob(SHARD_GLOB)))
        while True:
            path = self.shard_path(index)
            if self.write_shard(path, tokens):
                return path
            index += 1

    def shard_path(self, index: int) -> Path:
        """Return the path of a shard, counted from 0, whether it exists or not."""
        return self.folder / f"shard-{index:06d}.safetensors"

    def missing(self, count: int) -> list[int]:
        """Return which of the first `count` shards do not exist; remove those that are cut short.

        A shard depends on its number and the settings, so that it can be sampled again.
        """
        return _io.missing_files(self.shard_path(index) for index in range(count))

    def write_shard(self, path: Path, tokens: Tensor, prompts: RowPrompts | None = None) -> bool:
        """Write (rows, length) token ids as a shard; return False if it exists already.

        `path` comes from `shard_path`. Answers in chats come with their prompts. It raises an
        InvalidInputError if the shape is wrong, a token id is out of range, or a row continues
        after the end-of-text token.
        """
        self._require_valid(tokens)
        narrow = tokens.to(self.manifest.token_dtype).cpu().contiguous()
        metadata = {"crc32": str(_io.checksum(narrow))}
        stored = {} if prompts is None else prompts.tensors(self.manifest.token_dtype)
        try:
            _io.write_tensors(path, {"tokens": narrow, **stored}, metadata, replace=False)
        except FileExistsError:
            return False
        return True

    def _require_valid(self, tokens: Tensor) -> None:
        manifest = self.manifest
        if tokens.dim() != 2 or tokens.shape[1] != manifest.length or not len(tokens):
            raise InvalidInputError(
                f"A shard must have the shape (rows, {manifest.length}), but has "
                f"{tuple(tokens.shape)}."
            )
        low, high = (int(bound) for bound in tokens.long().aminmax())
        if low < 0 or high >= manifest.vocab_size:
            raise InvalidInputError(
                f"Token ids range from {low} to {high}, but the corpus has a vocabulary of "
                f"{manifest.vocab_size}. Was another tokenizer used?"
            )
        if bool(torch.isin(tokens, torch.tensor(manifest.other_ends, device=tokens.device)).any()):
            raise InvalidInputError(
                f"Some rows hold a token of {list(manifest.other_ends)}, which end texts. Replace "
                f"it by the end-of-text token, {manifest.eos_token_id}."
            )
        if manifest.eos_token_id is not None:
            ended = (tokens == manifest.eos_token_id).cumsum(1) > 0
            if bool((ended & (tokens != manifest.eos_token_id)).any()):
                raise InvalidInputError(
                    f"Some rows go on after end of text ({manifest.eos_token_id}). Pad the rest of "
                    f"a row with it; if it also begins texts, omit that first token."
                )

    def shards(self) -> list[Shard]:
        """List the shards that exist now, ordered by name."""
        paths = sorted(self.folder.glob(SHARD_GLOB))
        return [
            Shard(path, shape[0], metadata.get("crc32", ""))
            for path, (shape, metadata) in zip(
                paths, _io.read_headers(paths, "tokens"), strict=True
            )
        ]

    def split(self, held_out: int) -> list[ShardSplit]:
        """Hold out rows from training, an even share from the end of every shard.

        Args:
            held_out: The number of rows to hold out.

        Returns:
            The split of every shard.

        Raises:
            InvalidInputError: If no row would be left to train on.
        """
        shards = self.shards()
        total = sum(shard.rows for shard in shards)
        if not 0 <= held_out < total:
            raise InvalidInputError(
                f"Cannot hold {held_out} rows out of {self.folder}, which has {total}. Sample "
                f"more, or hold out fewer."
            )
        ends = list(accumulate(shard.rows for shard in shards))
        # Held-out rows up to the end of each shard, rounded down.
        cumulative = [held_out * end // total for end in [0, *ends]]
        return [
            ShardSplit(shard, after - before)
            for shard, before, after in zip(shards, cumulative[:-1], cumulative[1:], strict=True)
        ]

    def read(self, shard: Shard) -> Tensor:
        """Map a shard into memory, and check it: (rows, length), of the manifest's `token_dtype`.

        It raises an InvalidFileError if the shard is damaged.
        """
        tokens = self._open(shard)
        if shard.crc32 != str(_io.checksum(tokens)):
            raise InvalidFileError(
                f"{shard.path} is damaged: its checksum does not match. Remove it, or copy it "
                f"again; the other shards are not affected."
            )
        return tokens

    def read_prompts(self, shard: Shard) -> RowPrompts | None:
        """Read the prompts of a shard's rows; None if it has none."""
        tensors, _ = _io.read_tensors(shard.path)
        return RowPrompts.from_tensors(tensors) if "contexts" in tensors else None

    def _open(self, shard: Shard) -> Tensor:
        tensors, _ = _io.read_tensors(shard.path)
        return _io.take_tensor(tensors, "tokens", (shard.rows, self.manifest.length), shard.path)

    def held_out(self, split: list[ShardSplit]) -> Tensor:
        """Read the held-out rows of a split, and no others: (rows, length), int64."""
        rows = [
            self._open(item.shard)[item.training_rows :].long()
            for item in split
            if item.held_out_rows
        ]
        return torch.cat(rows) if rows else torch.empty(0, self.manifest.length, dtype=torch.long)

    def batches(
        self,
        split: list[ShardSplit],
        batch_size: int,
        *,
        seed: int,
        epoch: int,
        start: int = 0,
        part: tuple[int, int] = (0, 1),
    ) -> Iterator[Tensor]:
        """Stream the training rows of one epoch, shuffled, in batches of nearly equal size.

        Shards are shuffled, and rows within each shard. The order depends on the seed and the epoch
        alone, so that all processes see the same batches. Memory holds two shards at a time.

        Args:
            split: The result of `split`.
            batch_size: The largest number of rows in a batch.
            seed: Seed of the order.
            epoch: The number of the epoch.
            start: The number of batches to skip, to resume within an epoch.
            part: `(rank, size)`: yield every size-th row of each batch, from row `rank` on.

        Yields:
            Token ids, (rows, length), int64.
        """
        sizes = _equal_sizes(sum(item.training_rows for item in split), batch_size)
        skip, taken = sum(sizes[:start]), 0  # rows to skip; rows of the current batch so far
        rank, size = part
        batch: list[Tensor] = []
        unread: list[tuple[int, int]] = []  # shards, and their first rows
        for number in np.random.default_rng([seed, epoch]).permutation(len(split)):
            training_rows = split[number].training_rows
            first, skip = min(skip, training_rows), max(0, skip - training_rows)
            if first < training_rows:
                unread.append((int(number), first))
        shards = ((*item, self.read(split[item[0]].shard).numpy()) for item in unread)
        for number, first, tokens in _io.read_ahead(shards):
            training_rows = split[number].training_rows
            order = np.random.default_rng([seed, epoch, number]).permutation(training_rows)
            while first < training_rows:
                count = min(training_rows - first, sizes[start] - taken)
                local = order[first + (rank - taken) % size : first + count : size]
                batch.append(torch.from_numpy(tokens[local].astype(np.int64)))
                first, taken = first + count, taken + count
                if taken == sizes[start]:
                    yield torch.cat(batch)
                    start, taken, batch = start + 1, 0, []


def _equal_sizes(rows: int, batch_size: int) -> list[int]:
    """Divide rows into batches of at most `batch_size` whose sizes differ by at most 1.

    A small last batch would have the weight of a full one in EM.
    """
    count = -(-rows // batch_size)
    return [rows * (n + 1) // count - rows * n // count for n in range(count)]
