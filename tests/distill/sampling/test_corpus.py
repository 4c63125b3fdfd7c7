"""The corpus: atomic appends, exact reads, the same order in every process."""

import gc
import json
import weakref
from pathlib import Path

import pytest
import torch

import forked
from foretrace.distill import Corpus, Manifest
from foretrace.distill.sampling.corpus import Shard
from foretrace.errors import InvalidFileError, InvalidInputError

MANIFEST = Manifest(
    length=4,
    vocab_size=1000,
    eos_token_id=0,
    tokenizer_fingerprint="sha256:abc",
    source_model="a-model",
    sampling={"temperature": 1.0},
)


def numbered(first: int, count: int) -> torch.Tensor:
    """Return distinct rows: row r holds r, r + 1, r + 2, r + 3."""
    return torch.arange(first, first + count)[:, None] + torch.arange(4)


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    corpus = Corpus.create(tmp_path / "corpus", MANIFEST)
    for first, count in ((1, 50), (51, 30), (81, 41)):
        corpus.append(numbered(first, count))
    return corpus


def test_rows_survive_a_round_trip(corpus: Corpus) -> None:
    again = Corpus(corpus.folder)
    assert again.manifest == MANIFEST
    assert [shard.rows for shard in again.shards()] == [50, 30, 41]
    assert torch.equal(again.read(again.shards()[1]).long(), numbered(51, 30))


@pytest.mark.parametrize(("vocab", "dtype"), [(65536, torch.uint16), (65537, torch.uint32)])
def test_ids_are_stored_in_the_narrowest_dtype(
    vocab: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    corpus = Corpus.create(tmp_path, Manifest(length=2, vocab_size=vocab))
    corpus.append(torch.tensor([[0, vocab - 1]]))
    (shard,) = corpus.shards()
    assert corpus.read(shard).dtype == dtype
    assert corpus.read(shard).long().tolist() == [[0, vocab - 1]]


def test_an_epoch_has_every_training_row_once(corpus: Corpus) -> None:
    split = corpus.split(held_out=12)
    held_out = corpus.held_out(split)
    assert len(held_out) == 12
    batches = list(corpus.batches(split, 16, seed=1, epoch=0))
    assert sorted(len(batch) for batch in batches) == [15] * 3 + [16] * 4  # nearly equal
    rows = torch.cat([*batches, held_out])
    assert sorted(rows[:, 0].tolist()) == list(range(1, 122))
    assert torch.equal(rows[:, 3], rows[:, 0] + 3)


def test_order_depends_on_seed_and_epoch_alone(corpus: Corpus) -> None:
    split = corpus.split(held_out=0)

    def order(seed: int, epoch: int) -> list[int]:
        batches = corpus.batches(split, 16, seed=seed, epoch=epoch)
        return torch.cat(list(batches))[:, 0].tolist()

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(2, 0)
    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != sorted(order(1, 0))


@pytest.mark.parametrize(("rows", "held_out"), [(20, 10), (20, 301), (1, 10)])
def test_the_number_of_held_out_rows_is_exact(rows: int, held_out: int, tmp_path: Path) -> None:
    """With shards of one row, entire shards are held out."""
    corpus = Corpus.create(tmp_path, MANIFEST)
    for first in range(1, 31):
        corpus.append(numbered(first, rows))
    split = corpus.split(held_out)
    assert sum(item.held_out_rows for item in split) == held_out
    assert len(corpus.held_out(split)) == held_out
    batches = corpus.batches(split, 7, seed=0, epoch=0)
    assert sum(map(len, batches)) == 30 * rows - held_out


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_processes_share_every_batch(corpus: Corpus, size: int) -> None:
    split = corpus.split(held_out=11)
    batches = corpus.batches(split, 16, seed=1, epoch=4)
    parts = [corpus.batches(split, 16, seed=1, epoch=4, part=(rank, size)) for rank in range(size)]
    for batch, *shares in zip(batches, *parts, strict=True):
        for rank, share in enumerate(shares):
            assert torch.equal(share, batch[rank::size])


@pytest.mark.parametrize("start", range(9))
def test_reading_resumes_at_any_batch(corpus: Corpus, start: int) -> None:
    split = corpus.split(held_out=0)
    batches = list(corpus.batches(split, 16, seed=3, epoch=2))
    rest = list(corpus.batches(split, 16, seed=3, epoch=2, start=start))
    assert len(rest) == len(batches) - start
    assert all(torch.equal(*pair) for pair in zip(rest, batches[start:], strict=True))


def test_reading_holds_one_shard_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = Corpus.create(tmp_path, MANIFEST)
    for first in range(1, 401, 20):
        corpus.append(numbered(first, 20))
    alive: list[weakref.ref[torch.Tensor]] = []
    read = Corpus.read

    def watched(self: Corpus, shard: Shard) -> torch.Tensor:
        tokens = read(self, shard)
        alive.append(weakref.ref(tokens))
        return tokens

    monkeypatch.setattr(Corpus, "read", watched)
    gc.freeze()  # collect what is made from here on, not all that is imported
    for _ in corpus.batches(corpus.split(held_out=0), 7, seed=0, epoch=0):
        gc.collect()
        assert sum(reference() is not None for reference in alive) <= 1
    gc.unfreeze()
    assert len(alive) == 20


APPEND_TEN = """
import sys, torch
from foretrace.distill import Corpus
for turn in range(10):
    row = 1 + int(sys.argv[2]) + turn + torch.arange(4)
    Corpus(sys.argv[1]).append(row[None])
"""


def test_processes_append_side_by_side(tmp_path: Path) -> None:
    made = Corpus.create(tmp_path, MANIFEST)
    workers = [forked.start(forked.script, APPEND_TEN, tmp_path, 10 * index) for index in range(4)]
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 4
    found = [int(made.read(shard)[0, 0]) for shard in made.shards()]
    assert sorted(found) == list(range(1, 41))
    assert not list(tmp_path.glob(".*"))


def test_an_existing_shard_is_not_overwritten(corpus: Corpus) -> None:
    path = corpus.shards()[0].path
    assert not corpus.write_shard(path, numbered(500, 2))
    assert torch.equal(corpus.read(corpus.shards()[0]).long(), numbered(1, 50))


def test_a_damaged_shard_is_refused(corpus: Corpus) -> None:
    path = corpus.shards()[1].path
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(InvalidFileError, match=r"shard-000001.safetensors is damaged.*Remove it"):
        corpus.read(corpus.shards()[1])
    path.write_bytes(content[:40])
    with pytest.raises(InvalidFileError, match="cut short"):
        corpus.shards()


def test_another_manifest_is_refused(corpus: Corpus) -> None:
    assert Corpus.create(corpus.folder, MANIFEST).manifest == MANIFEST
    other = Manifest(length=8, vocab_size=1000, eos_token_id=0)
    with pytest.raises(InvalidFileError, match=r"length.*differ"):
        Corpus.create(corpus.folder, other)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.zeros(3, 5, dtype=torch.long), r"\(rows, 4\)"),
        (torch.zeros(0, 4, dtype=torch.long), r"\(rows, 4\)"),
        (torch.full((1, 4), 1000), "vocabulary of 1000"),
        (torch.full((1, 4), -1), "another tokenizer"),
        (torch.tensor([[0, 5, 6, 7]]), "go on after end of text"),
    ],
)
def test_invalid_rows_are_refused(corpus: Corpus, tokens: torch.Tensor, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        corpus.append(tokens)


def test_holding_out_all_rows_is_refused(corpus: Corpus) -> None:
    with pytest.raises(InvalidInputError, match="which has 121"):
        corpus.split(held_out=121)


@pytest.mark.parametrize(
    ("content", "message"),
    [({"format_version": 9}, "format version"), ({"format_version": 1}, "cannot be read")],
)
def test_an_unreadable_manifest_is_refused(
    content: dict[str, int], message: str, tmp_path: Path
) -> None:
    (tmp_path / "corpus.json").write_text(json.dumps(content))
    with pytest.raises(InvalidFileError, match=message):
        Corpus(tmp_path)


def test_an_invalid_manifest_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="vocabulary ends at 4"):
        Manifest(length=4, vocab_size=5, eos_token_id=9)
    with pytest.raises(InvalidInputError, match="at least 1 token"):
        Manifest(length=0, vocab_size=5)
