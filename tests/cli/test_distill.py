"""`foretrace distill` in a subprocess."""

import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
import typer

from foretrace.cli.distill import parse_count
from foretrace.hmm import HMM
from forked import run_foretrace


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return run_foretrace("distill", *arguments, environment={"COLUMNS": "120"})


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


def test_distill_writes_an_hmm(tiny_lm: Path, tmp_path: Path) -> None:
    pytest.importorskip("faiss", reason="needs the extra `transformers`")
    (tmp_path / "prompts.txt").write_text("w1 w2\nw3\n")
    arguments = [str(tiny_lm), "--states", "6", "--sequences", "0.2k", "--length", "16"]
    arguments += ["--prompts", str(tmp_path / "prompts.txt"), "--held-out", "40", "--epochs", "2"]
    arguments += ["--out", str(tmp_path / "hmm"), "--device", "cpu"]
    planned = run(*arguments, "--plan")
    assert planned.returncode == 0, planned.stderr
    assert "train by EM" in planned.stdout
    assert re.search(r"disk: [\d.]+ MB", planned.stdout)
    assert not (tmp_path / "hmm").exists()
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    assert "written to" in done.stdout
    assert HMM.from_pretrained(tmp_path / "hmm").num_states == 6


def test_distill_under_torchrun(tiny_lm: Path, tmp_path: Path) -> None:
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


def test_unknown_model_is_a_one_line_error(tmp_path: Path) -> None:
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
