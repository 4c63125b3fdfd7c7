"""Latent variable distillation: clusters of hidden states become the states of the HMM."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from foretrace.distill.clustering import Basis
from foretrace.distill.em.measures import text_mask
from foretrace.distill.latent import FILE_ROWS, LatentConfig, LatentStart
from foretrace.distill.sampling.corpus import Corpus, Manifest, ShardSplit
from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM, inference

pytest.importorskip("faiss", reason="needs the extra `transformers`")

ROWS, LENGTH, VOCAB = 1500, 12, 30


@pytest.fixture(scope="module")
def truth() -> HMM:
    """Return an HMM of four states with different words, and the end of text."""
    hmm = HMM.random(5, VOCAB, eos_token_id=0, seed=2)
    sharp = torch.stack([row.exp() for row in 4 * torch.randn(4, 5, generator=_random(1))])
    transition = torch.cat([sharp / sharp.sum(1, keepdim=True), torch.eye(5)[-1:]])
    identity = torch.eye(5)
    words = torch.stack([hmm.emission.predict(state) for state in identity], 1)  # (V, h)
    for state in range(4):
        words[:, state] *= torch.where(torch.arange(VOCAB) % 4 == state, 20.0, 1.0)
    words /= words.sum(0)
    return HMM(hmm.initial, transition, words, hmm.config)


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def drawn(truth: HMM, tmp_path: Path) -> tuple[Corpus, dict[tuple[int, ...], Tensor]]:
    """Return a corpus of the true HMM, and the states of each row."""
    corpus = Corpus.create(tmp_path / "corpus", Manifest(LENGTH, VOCAB, eos_token_id=0))
    sampled = inference.sample(truth, ROWS, LENGTH, _random(0))
    for rows in torch.split(sampled.tokens, 500):
        corpus.append(rows)
    pairs = zip(sampled.tokens.tolist(), sampled.states, strict=True)
    return corpus, {tuple(tokens): states for tokens, states in pairs}


class TrueStates:
    """Replaces an LM by one whose hidden states are the true states, one axis each."""

    def __init__(self, states: dict[tuple[int, ...], Tensor]) -> None:
        self.states, self.rows_read = states, 0

    def __call__(self, rows: Tensor, contexts: object) -> Tensor:
        self.rows_read += len(rows)
        states = torch.stack([self.states[tuple(row)] for row in rows.tolist()])
        return torch.eye(5)[torch.cat([states, states[:, -1:]], 1)]


def latent_start(
    corpus: Corpus, folder: Path, states: int, rows: int = 128, iterations: int = 10
) -> LatentStart:
    config = LatentConfig(iterations=iterations)
    return LatentStart(corpus, corpus.split(300), states, rows, config, folder)


def read(start: LatentStart, reader: "TrueStates") -> None:
    for number in start.missing():
        start.write(reader, number)


def nats_per_token(hmm: HMM, rows: Tensor) -> float:
    return float(hmm.log_likelihood(rows).sum() / text_mask(rows, 0).sum())


def test_the_true_states_are_recovered(
    truth: HMM, drawn: tuple[Corpus, dict[tuple[int, ...], Tensor]], tmp_path: Path
) -> None:
    """There are up to 5 x 4 pairs of states; the start is close to the truth before EM."""
    corpus, states = drawn
    start = latent_start(corpus, tmp_path, 21, ROWS, iterations=20)
    read(start, TrueStates(states))
    hmm = start.build_hmm(start.cluster())
    held_out = corpus.held_out(corpus.split(300))
    unigram = HMM(torch.ones(1), torch.ones(1, 1), _unigram(corpus))
    assert nats_per_token(hmm, held_out) > nats_per_token(truth, held_out) - 0.15
    assert nats_per_token(hmm, held_out) > nats_per_token(unigram, held_out) + 0.3
    assert hmm.config.eos_token_ids == (0,)
    assert hmm.emission.of_tokens(torch.tensor([0]))[0].tolist() == [0.0] * 20 + [1.0]


def _unigram(corpus: Corpus) -> Tensor:
    rows = torch.cat([corpus.read(shard).long() for shard in corpus.shards()])
    counts = torch.bincount(rows[text_mask(rows, 0)], minlength=VOCAB).float()[:, None]
    return counts / counts.sum()


def test_rows_come_from_all_shards_without_repetition(
    drawn: tuple[Corpus, dict[tuple[int, ...], Tensor]], tmp_path: Path
) -> None:
    corpus, states = drawn
    start = latent_start(corpus, tmp_path, 6, 450)  # of 1,200
    reader = TrueStates(states)
    read(start, reader)
    rows = torch.cat([block.tokens for block in start.blocks()])
    assert 450 <= len(rows) <= 450 + FILE_ROWS
    assert {number for number, _ in start.pieces} == {0, 1, 2}
    complete = latent_start(corpus, tmp_path / "all", 6, ROWS)
    reader = TrueStates(states)
    read(complete, reader)
    assert reader.rows_read == 1200 + FILE_ROWS  # one file twice: first for the basis
    rows = torch.cat([block.tokens for block in complete.blocks()])
    trained = torch.cat(list(corpus.batches(corpus.split(300), 100, seed=0, epoch=0)))
    assert sorted(rows.tolist()) == sorted(trained.tolist())


def test_existing_files_are_reused(
    drawn: tuple[Corpus, dict[tuple[int, ...], Tensor]], tmp_path: Path
) -> None:
    corpus, states = drawn
    once = latent_start(corpus, tmp_path / "once", 6, iterations=5)
    read(once, TrueStates(states))
    expected = once.cluster()

    broken = latent_start(corpus, tmp_path / "twice", 6, iterations=5)
    reader = TrueStates(states)
    read(broken, reader)
    removed = broken.paths[0]
    removed.unlink()
    passes: list[int] = []

    def interrupt(done: int, total: int) -> None:
        passes.append(done)
        if done == 3:
            raise KeyboardInterrupt

    assert broken.missing() == [0]
    before = reader.rows_read
    read(broken, reader)
    assert 0 < reader.rows_read - before <= FILE_ROWS
    with pytest.raises(KeyboardInterrupt):
        broken.cluster(interrupt)
    again = latent_start(corpus, tmp_path / "twice", 6, iterations=5)
    assert torch.allclose(again.cluster(lambda done, total: passes.append(done)), expected)
    assert passes == [1, 2, 3, 4, 5]


def test_a_basis_keeps_the_strongest_axes() -> None:
    """Three axes of forty carry nearly all variance, so that they preserve neighbours."""
    strong = torch.linalg.qr(torch.randn(40, 3, generator=_random(1))).Q
    coordinates = torch.randn(500, 3, generator=_random(2))
    hidden = coordinates @ strong.T + 0.01 * torch.randn(500, 40, generator=_random(3))
    basis = Basis.fit(hidden, 3)
    projected = basis(hidden)
    assert projected.shape == (500, 3)
    assert torch.allclose(projected.norm(dim=1), torch.ones(500), atol=1e-5)
    expected = torch.nn.functional.normalize(coordinates, dim=1)
    nearest = torch.cdist(expected, expected).fill_diagonal_(9).argmin(1)
    radius = torch.linalg.norm(projected - projected[nearest], dim=1)
    ranks = torch.cdist(projected, projected) < radius[:, None]
    assert ranks.sum(1).float().median() < 10  # of 500: neighbours stay neighbours


def test_a_basis_of_few_vectors_has_few_axes() -> None:
    assert Basis.fit(torch.randn(5, 40), 128).axes.shape[1] <= 5


def test_a_corpus_without_an_end_of_text_is_refused(tmp_path: Path) -> None:
    corpus = Corpus.create(tmp_path, Manifest(LENGTH, VOCAB))
    empty: list[ShardSplit] = []
    with pytest.raises(InvalidInputError, match="Start at random"):
        LatentStart(corpus, empty, 6, 100, LatentConfig(), tmp_path)


@pytest.mark.parametrize("wrong", [{"dimensions": 0}, {"iterations": 0}])
def test_invalid_settings_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidInputError):
        LatentConfig(**wrong)
