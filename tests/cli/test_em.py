"""`foretrace em`, run as a user runs it; tests/distill/em/test_train.py runs whole trainings."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from foretrace.distill import Corpus, Manifest
from foretrace.hmm import HMM


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    made = Corpus.create(tmp_path / "corpus", Manifest(length=6, vocab_size=20, eos_token_id=3))
    made.append(HMM.random(4, 20, eos_token_id=3, seed=1).sample(200, 6, seed=0))
    return made.folder


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "foretrace", "em", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_from_a_random_start_and_then_from_there(corpus: Path, tmp_path: Path) -> None:
    few = ("--epochs", 2, "--batch-size", 50, "--held-out", 40)
    first = run(corpus, "--states", 4, "--out", tmp_path / "first", *few)
    assert first.returncode == 0, first.stderr
    assert "held-out" in first.stdout
    second = run(corpus, "--start", tmp_path / "first", "--out", tmp_path / "second", *few)
    assert second.returncode == 0, second.stderr
    hmm = HMM.from_pretrained(tmp_path / "second")
    assert hmm.config.distillation["epochs"] == 2
    assert hmm.dtype == torch.float32


@pytest.mark.parametrize("wrong", [(), ("--states", 4, "--start", "somewhere")])
def test_one_start_and_only_one(wrong: tuple[object, ...], corpus: Path, tmp_path: Path) -> None:
    failed = run(corpus, "--out", tmp_path / "out", *wrong)
    assert failed.returncode == 1
    assert "either --states" in failed.stderr


def test_a_folder_that_is_no_corpus(tmp_path: Path) -> None:
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
