"""`foretrace distill` and `foretrace em`; tests/distill tests the training."""

import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
import torch
import typer

from foretrace.cli.distill import parse_count
from foretrace.distill import Corpus, Manifest
from foretrace.hmm import HMM
from forked import Run


@pytest.mark.parametrize(
    ("text", "number"),
    [("120000", 120_000), ("120k", 120_000), ("2.01M", 2_010_000), ("1B", 10**9)],
)
def test_parse_count(text: str, number: int) -> None:
    assert parse_count(text) == number


@pytest.mark.parametrize("text", ["", "k", "many", "-5", "0.5", "1e", "inf", "nan"])
def test_parse_count_rejects_other_text(text: str) -> None:
    with pytest.raises((typer.BadParameter, click.BadParameter), match="120k"):
        parse_count(text)


def test_distill_writes_an_hmm(run: Run, tiny_lm: Path, tmp_path: Path) -> None:
    pytest.importorskip("faiss", reason="needs the extra `transformers`")
    (tmp_path / "prompts.txt").write_text("w1 w2\nw3\n")
    arguments = [str(tiny_lm), "--states", "6", "--sequences", "0.2k", "--length", "16"]
    arguments += ["--prompts", str(tmp_path / "prompts.txt"), "--held-out", "40", "--epochs", "2"]
    arguments += ["--out", str(tmp_path / "hmm"), "--device", "cpu"]
    planned = run("distill", *arguments, "--plan")
    assert planned.code == 0, planned.err
    assert "train by EM" in planned.out
    assert re.search(r"disk: [\d.]+ MB", planned.out)
    assert not (tmp_path / "hmm").exists()
    done = run("distill", *arguments)
    assert done.code == 0, done.err
    assert "written to" in done.out
    assert HMM.from_pretrained(tmp_path / "hmm").num_states == 6


def test_distill_under_torchrun(run: Run, tiny_lm: Path, tmp_path: Path) -> None:
    pytest.importorskip("faiss", reason="needs the extra `transformers`")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    arguments = ["--states", "6", "--sequences", "200", "--length", "16", "--held-out", "40"]
    arguments += ["--epochs", "2", "--out", str(tmp_path / "hmm"), "--device", "cpu"]
    ran = subprocess.run(
        [*launch, "-m", "foretrace", "distill", str(tiny_lm), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr
    assert HMM.from_pretrained(tmp_path / "hmm").num_states == 6


def test_unknown_model_is_a_one_line_error(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the extra `transformers`")
    hub = {"HF_ENDPOINT": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": ""}
    # The hub's client reads these variables when it is imported: a fork has imported it already.
    failed = subprocess.run(
        [sys.executable, "-m", "foretrace", "distill", "no/such-model", "--out", tmp_path / "hmm"],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "120", **hub},
    )
    assert failed.returncode == 1
    assert "http://127.0.0.1:9 cannot be reached" in failed.stderr
    assert "Retrying" not in failed.stderr  # the hub's client would wait for a minute
    assert "Traceback" not in failed.stderr
    assert "check the spelling" in failed.stderr.replace("\n", " ")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    corpus = Corpus.create(tmp_path / "corpus", Manifest(length=6, vocab_size=20, eos_token_id=3))
    corpus.append(HMM.random(4, 20, eos_token_id=3, seed=1).sample(200, 6, seed=0))
    return corpus.folder


def test_train_from_random_then_from_an_hmm(run: Run, corpus: Path, tmp_path: Path) -> None:
    options = ("--epochs", 2, "--batch-size", 50, "--held-out", 40)
    first = run("em", corpus, "--states", 4, "--out", tmp_path / "first", *options)
    assert first.code == 0, first.err
    assert "held-out" in first.out
    adapted = ("--start", tmp_path / "first", "--first-step", 0.3)
    second = run("em", corpus, *adapted, "--out", tmp_path / "second", *options)
    assert second.code == 0, second.err
    hmm = HMM.from_pretrained(tmp_path / "second")
    facts = hmm.config.distillation
    assert (facts["epochs"], facts["first_step"]) == (2, 0.3)
    assert facts["start"]["first_step"] == 1.0  # the first run's, kept apart from this one's
    assert hmm.dtype == torch.float32


@pytest.mark.parametrize("options", [(), ("--states", 4, "--start", "somewhere")])
def test_states_and_start_exclude_each_other(
    run: Run, options: tuple[object, ...], corpus: Path, tmp_path: Path
) -> None:
    failed = run("em", corpus, "--out", tmp_path / "out", *options)
    assert failed.code == 1
    assert "either --states" in failed.err


def test_folder_without_a_corpus_is_an_error(run: Run, tmp_path: Path) -> None:
    failed = run("em", tmp_path, "--states", 4, "--out", tmp_path / "out")
    assert failed.code == 1
    assert "no corpus.json" in failed.err


def test_tensorboard_is_optional(run: Run, corpus: Path, tmp_path: Path) -> None:
    from importlib.util import find_spec

    options = ("--tensorboard", "--epochs", 1, "--held-out", 40)
    done = run("em", corpus, "--states", 4, "--out", tmp_path / "out", *options)
    if find_spec("tensorboard") is None:
        assert done.code == 1
        assert "pip install tensorboard" in done.err
    else:
        assert done.code == 0, done.err
        assert list((tmp_path / "out" / "tensorboard").iterdir())
