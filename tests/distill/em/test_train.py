"""EM: monotone, nearly as good in mini-batches, independent of processes and interruptions."""

import json
import os
import subprocess
import sys
import time
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import forked
from foretrace.distill import Corpus, EMConfig, Manifest, Progress, train
from foretrace.distill.em.e_step import BatchCounts, EStep, Workspace
from foretrace.distill.em.m_step import Counts
from foretrace.errors import InvalidFileError, InvalidInputError, TokenizerMismatchError
from foretrace.hmm import HMM
from tiny import dense_tables

EOS = 3


def write_corpus(folder: Path, source: HMM, rows: int, length: int, shards: int = 3) -> Corpus:
    eos = source.config.eos_token_ids
    manifest = Manifest(
        length=length,
        vocab_size=source.vocab_size,
        eos_token_id=eos[0] if eos else None,
        source_model="an HMM",
    )
    corpus = Corpus.create(folder, manifest)
    for texts in torch.chunk(source.sample(rows, length, seed=1), shards):
        corpus.append(texts)
    return corpus


def concentrated(states: int, vocab: int, seed: int, eos: int | None = None) -> HMM:
    """Return a source with structure to learn: peaked transitions and emissions."""
    hmm = HMM.random(states, vocab, seed=seed, eos_token_id=eos)
    initial, transition, emission = (
        table**3 for table in dense_tables(hmm.to(dtype=torch.float64))
    )
    return HMM(
        initial / initial.sum(),
        transition / transition.sum(1, keepdim=True),
        emission / emission.sum(0),
        hmm.config,
    )


@given(
    seed=st.integers(0, 10_000),
    states=st.integers(2, 6),
    vocab=st.integers(5, 12),
    eos=st.sampled_from([None, EOS]),
)
@settings(max_examples=40, deadline=None)
def test_full_batch_em_never_lowers_the_likelihood(
    seed: int, states: int, vocab: int, eos: int | None
) -> None:
    source = HMM.random(states, vocab, seed=seed + 1, eos_token_id=eos)
    texts = source.sample(20, 8, seed=seed)
    start = HMM.random(states, vocab, seed=seed, eos_token_id=eos, dtype=torch.float64)
    counts = Counts.from_hmm(start, 8, pseudocount=0.0, ends=start.config.eos_token_ids)
    tokens, index = torch.unique(texts, return_inverse=True)
    before = -float("inf")
    for _ in range(6):
        new = BatchCounts.zeros(len(tokens), states, Workspace(counts.initial))
        EStep(states, 8, torch.float64, counts.initial).accumulate(
            counts.parameters(tokens), index, new
        )
        likelihood = float(new.summary[0])
        assert likelihood >= before - 1e-9 * abs(likelihood)
        before = likelihood
        counts.update(tokens, new, 1.0)


def test_mini_batches_reach_the_likelihood_of_the_full_batch(tmp_path: Path) -> None:
    source = concentrated(8, 60, seed=5)
    corpus = write_corpus(tmp_path, source, rows=6000, length=16)
    start = HMM.random(8, 60, seed=9)
    full = train(start, corpus, EMConfig(epochs=60, batch_size=6000, last_step=1.0, held_out=1000))
    mini = train(start, corpus, EMConfig(epochs=20, batch_size=250, held_out=1000))
    fresh = source.sample(2000, 16, seed=77)
    per_token = {
        name: float(hmm.log_likelihood(fresh).mean()) / 16
        for name, hmm in {"source": source, "full": full, "mini": mini}.items()
    }
    assert per_token["mini"] >= per_token["full"] - 0.02
    assert per_token["mini"] >= per_token["source"] - 0.1


def test_half_precision_reaches_the_same_likelihood(tmp_path: Path) -> None:
    source = concentrated(128, 2000, seed=3, eos=EOS)
    corpus = write_corpus(tmp_path, source, rows=8000, length=16)
    start = HMM.random(128, 2000, seed=2, eos_token_id=EOS)
    reached = {}
    for dtype in ("float32", "bfloat16"):
        seen: list[Progress] = []
        config = EMConfig(epochs=8, batch_size=1000, held_out=1000, dtype=dtype)
        train(start, corpus, config, on_progress=seen.append)
        reached[dtype] = seen[-1].held_out
    assert reached["float32"] is not None
    assert reached["bfloat16"] is not None
    assert abs(reached["float32"] - reached["bfloat16"]) < 0.005


def test_metrics_are_observed_and_written(tmp_path: Path) -> None:
    source = concentrated(8, 60, seed=5, eos=EOS)
    corpus = write_corpus(tmp_path / "corpus", source, rows=1100, length=16)
    seen: list[Progress] = []
    config = EMConfig(epochs=4, batch_size=100, held_out=100, evaluations=5)
    hmm = train(
        HMM.random(8, 60, seed=1, eos_token_id=EOS),
        corpus,
        config,
        folder=tmp_path / "run",
        on_progress=seen.append,
    )
    assert [progress.step for progress in seen] == list(range(1, 41))
    assert {progress.steps for progress in seen} == {40}
    assert seen[0].step_size == 1.0
    assert seen[-1].step_size == pytest.approx(1 / 40)
    measured = [progress for progress in seen if progress.held_out is not None]
    assert len(measured) == 5
    assert measured[-1].step == 40
    held_out, baselines = measured[-1].held_out, measured[-1].baselines
    assert held_out is not None
    assert baselines is not None
    assert held_out > baselines.unigram
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 41))
    assert lines[-1]["held_out"] == held_out
    facts = hmm.config.distillation
    assert facts["held_out_log_likelihood"] == held_out
    assert facts["unigram_log_likelihood"] == baselines.unigram
    assert hmm.config.source_model == "an HMM"
    # the returned HMM has the held-out log-likelihood
    rows = corpus.held_out(corpus.split(100))
    text = (rows == EOS).cumsum(1) <= 1
    assert len(rows) == 100
    again = float(hmm.log_likelihood(rows).sum()) / int(text.sum())
    assert again == pytest.approx(held_out, abs=1e-4)


def em_command(corpus: Path, out: Path, *more: str) -> list[str]:
    options = ["--states", "12", "--epochs", "6", "--batch-size", "64", "--held-out", "100"]
    options += ["--checkpoint-minutes", "0", "--seed", "4", "--device", "cpu"]
    options += ["--dtype", "float64"]
    return ["em", str(corpus), "--out", str(out), *options, *more]


def tables(folder: Path) -> list[torch.Tensor]:
    return list(dense_tables(HMM.from_pretrained(folder)))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a corpus, and the HMM that one uninterrupted process trains on it."""
    folder = tmp_path_factory.mktemp("em")
    write_corpus(folder / "corpus", concentrated(12, 80, seed=8, eos=EOS), rows=1300, length=16)
    done = forked.run_foretrace(*em_command(folder / "corpus", folder / "one"))
    assert done.returncode == 0, done.stderr
    assert "held-out" in done.stdout
    assert "bigram" in done.stdout
    return folder / "corpus", folder / "one"


def run_two_processes(arguments: list[str]) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, "-m", "foretrace", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr


def require_equal(folder: Path, other: Path) -> None:
    for found, expected in zip(tables(folder), tables(other), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_two_processes_train_the_same_hmm(trained: tuple[Path, Path], tmp_path: Path) -> None:
    corpus, alone = trained
    run_two_processes(em_command(corpus, tmp_path / "two"))
    require_equal(tmp_path / "two", alone)


def test_two_processes_in_single_precision(trained: tuple[Path, Path], tmp_path: Path) -> None:
    """In one epoch: over many, EM amplifies differences of rounding."""
    once = ["--dtype", "float32", "--epochs", "1"]
    run_two_processes(em_command(trained[0], tmp_path / "two", *once))
    assert forked.run_foretrace(*em_command(trained[0], tmp_path / "one", *once)).returncode == 0
    require_equal(tmp_path / "two", tmp_path / "one")


def test_a_killed_run_resumes_exactly(trained: tuple[Path, Path], tmp_path: Path) -> None:
    """It is killed with -9 within an epoch, three times; the metrics are complete as well."""
    corpus, alone = trained
    out = tmp_path / "killed"
    command = em_command(corpus, out)
    nowhere = Path(os.devnull)
    for lines in (5, 30, 71):
        process = forked.start(forked.foretrace, command, stdout=nowhere, stderr=nowhere)
        metrics, deadline = out / "metrics.jsonl", time.monotonic() + 120
        while not metrics.exists() or metrics.read_text().count("\n") < lines:
            assert time.monotonic() < deadline
            assert process.is_alive()
            time.sleep(0.001)
        process.kill()
        process.join()
        assert not (out / "hmm.safetensors").exists()
    done = forked.run_foretrace(*command)
    assert done.returncode == 0, done.stderr
    require_equal(out, alone)
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) == 6 * 19


@dataclass(frozen=True)
class Small:
    """A small run that has finished in its folder."""

    corpus: Corpus
    folder: Path
    result: HMM
    config: ClassVar = EMConfig(epochs=2, batch_size=50, held_out=20)
    start: ClassVar = HMM.random(4, 20, seed=1)

    def run(self, **settings: Any) -> HMM:
        """Run it again, with other settings, from another start or on another corpus."""
        start, corpus = settings.pop("start", self.start), settings.pop("corpus", self.corpus)
        seen = settings.pop("on_progress", None)
        config = replace(self.config, **settings)
        return train(start, corpus, config, folder=self.folder, on_progress=seen)


@pytest.fixture
def small(tmp_path: Path) -> Small:
    corpus = write_corpus(tmp_path / "corpus", concentrated(4, 20, seed=1), rows=200, length=6)
    result = train(Small.start, corpus, Small.config, folder=tmp_path / "run")
    return Small(corpus, tmp_path / "run", result)


def test_a_finished_run_is_not_run_again(small: Small) -> None:
    seen: list[Progress] = []
    again = small.run(on_progress=seen.append, checkpoint_minutes=1.0)
    assert not seen
    texts = small.start.sample(10, 6, seed=0)
    assert torch.equal(small.result.log_likelihood(texts), again.log_likelihood(texts))


def test_a_checkpoint_belongs_to_its_settings_its_start_and_its_corpus(
    small: Small, tmp_path: Path
) -> None:
    with pytest.raises(InvalidFileError, match=r"epochs was 2, is 3.*another folder"):
        small.run(epochs=3)
    with pytest.raises(InvalidFileError, match="started from another HMM"):
        small.run(start=HMM.random(4, 20, seed=2))
    with pytest.raises(InvalidFileError, match="states was 4, is 5"):
        small.run(start=HMM.random(5, 20, seed=1))
    other = write_corpus(tmp_path / "other", concentrated(4, 20, seed=2), rows=200, length=6)
    with pytest.raises(InvalidFileError, match="other shards"):
        small.run(corpus=other)
    small.corpus.append(torch.zeros(1, 6, dtype=torch.long))
    with pytest.raises(InvalidFileError, match="other shards"):
        small.run()


def test_a_damaged_checkpoint_is_refused(small: Small) -> None:
    metrics = small.folder / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes() + b"\0\0\0\n")  # as a power failure may leave it
    small.run()
    assert metrics.read_text().count("\n") == 8
    checkpoint = small.folder / "checkpoint.safetensors"
    content = bytearray(checkpoint.read_bytes())
    content[-5] ^= 1
    checkpoint.write_bytes(content)
    with pytest.raises(InvalidFileError, match=r"damaged.*Remove it"):
        small.run()


def test_mini_batches_need_a_pseudocount(small: Small) -> None:
    with pytest.raises(InvalidInputError, match="Mini-batches need a pseudocount"):
        small.run(pseudocount=0.0)


def test_the_start_is_freed(small: Small) -> None:
    """Its tables are as large as the counts: both together would double the memory."""
    alive: list[weakref.ref[HMM]] = []

    def start() -> HMM:
        hmm = HMM.random(4, 20, seed=1)
        alive.append(weakref.ref(hmm))
        return hmm

    seen: list[bool] = []
    config = EMConfig(epochs=1, batch_size=100, held_out=20)
    train(start(), small.corpus, config, on_progress=lambda _: seen.append(alive[0]() is None))
    assert seen == [True, True]


def test_the_hmm_must_fit_the_corpus(tmp_path: Path) -> None:
    manifest = Manifest(length=6, vocab_size=20, eos_token_id=3, tokenizer_fingerprint="x")
    corpus = Corpus.create(tmp_path, manifest)
    corpus.append(torch.zeros(50, 6, dtype=torch.long))
    config = EMConfig(held_out=5)
    with pytest.raises(InvalidInputError, match="21 tokens and the corpus 20"):
        train(HMM.random(4, 21), corpus, config)
    with pytest.raises(InvalidInputError, match="or neither"):
        train(HMM.random(4, 20), corpus, config)
    hmm = HMM.random(4, 20, eos_token_id=3)
    config_of_other = replace(hmm.config, tokenizer_fingerprint="y")
    other = HMM(hmm.initial, hmm.transition, hmm.emission, config_of_other)
    with pytest.raises(TokenizerMismatchError, match="another tokenizer"):
        train(other, corpus, config)


@pytest.mark.parametrize(
    "wrong",
    [
        {"epochs": 0},
        {"batch_size": 0},
        {"first_step": 0.2, "last_step": 0.5},
        {"pseudocount": -1.0},
        {"pseudocount": float("nan")},
        {"dtype": "int8"},
    ],
)
def test_invalid_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidInputError):
        EMConfig(**wrong)  # type: ignore[arg-type]
