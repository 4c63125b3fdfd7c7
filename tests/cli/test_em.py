"""`foretrace em` in a subprocess; tests/distill/test_em.py tests the training."""

import subprocess
from pathlib import Path

import pytest
import torch

from foretrace.distill import Corpus, Manifest
from foretrace.hmm import HMM
from forked import run_foretrace


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    corpus = Corpus.create(tmp_path / "corpus", Manifest(length=6, vocab_size=20, eos_token_id=3))
    corpus.append(HMM.random(4, 20, eos_token_id=3, seed=1).sample(200, 6, seed=0))
    return corpus.folder


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_foretrace("em", *arguments)


def test_train_from_random_then_from_an_hmm(corpus: Path, tmp_path: Path) -> None:
    options = ("--epochs", 2, "--batch-size", 50, "--held-out", 40)
    first = run(corpus, "--states", 4, "--out", tmp_path / "first", *options)
    assert first.returncode == 0, first.stderr
    assert "held-out" in first.stdout
    adapted = ("--start", tmp_path / "first", "--first-step", 0.3)
    second = run(corpus, *adapted, "--out", tmp_path / "second", *options)
    assert second.returncode == 0, second.stderr
    hmm = HMM.from_pretrained(tmp_path / "second")
    facts = hmm.config.distillation
    assert (facts["epochs"], facts["first_step"]) == (2, 0.3)
    assert facts["start"]["first_step"] == 1.0  # the first run's, kept apart from this one's
    assert hmm.dtype == torch.float32


@pytest.mark.parametrize("options", [(), ("--states", 4, "--start", "somewhere")])
def test_states_and_start_exclude_each_other(
    options: tuple[object, ...], corpus: Path, tmp_path: Path
) -> None:
    failed = run(corpus, "--out", tmp_path / "out", *options)
    assert failed.returncode == 1
    assert "either --states" in failed.stderr


def test_folder_without_a_corpus_is_an_error(tmp_path: Path) -> None:
    failed = run(tmp_path, "--states", 4, "--out", tmp_path / "out")
    assert failed.returncode == 1
    assert "no corpus.json" in failed.stderr


def test_tensorboard_is_optional(corpus: Path, tmp_path: Path) -> None:
    from importlib.util import find_spec

    done = run(
        corpus,
        "--states",
        4,
        "--out",
        tmp_path / "out",
        "--tensorboard",
        "--epochs",
        1,
        "--held-out",
        40,
    )
    if find_spec("tensorboard") is None:
        assert done.returncode == 1
        assert "pip install tensorboard" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert list((tmp_path / "out" / "tensorboard").iterdir())
