"""`foretrace hmm` in a subprocess."""

import subprocess
from pathlib import Path

import pytest
import torch

import foretrace
from foretrace.hmm import HMM
from forked import run_foretrace


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_foretrace(*arguments)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    HMM.random(16, 200, eos_token_id=7, seed=1).save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


def test_version() -> None:
    assert run("--version").stdout == f"foretrace {foretrace.__version__}\n"


def test_show(folder: Path) -> None:
    shown = run("hmm", "show", folder)
    assert shown.returncode == 0
    assert "16" in shown.stdout
    assert "end of text" in shown.stdout


def test_sparsify_then_show(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "sparse"
    done = run("hmm", "sparsify", folder, "--out", out, "--tolerance", 0.1, "--dtype", "bfloat16")
    assert done.returncode == 0, done.stderr
    assert f"written to {out}" in done.stdout.replace("\n", "")
    assert "bfloat16" in done.stdout  # the dtype of the output, not of the input
    loaded = HMM.from_pretrained(out)
    assert loaded.dtype == torch.bfloat16
    assert loaded.emission.kind == "sparse+background"
    assert "nats per token" in run("hmm", "show", out).stdout


def test_convert(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    hmm = HMM.from_pretrained(folder)
    identity = torch.eye(16)
    published = tmp_path / "published"
    published.mkdir()
    tensors = {
        "alpha_exp": hmm.transition.predict(identity),
        "beta": hmm.emission.predict(identity).log(),
        "gamma": hmm.initial.log(),
    }
    save_file(tensors, published / "model.safetensors")
    (published / "config.json").write_text('{"eos_token_id": 7}')
    done = run("hmm", "convert", published, "--out", tmp_path / "ours")
    assert done.returncode == 0, done.stderr
    texts = hmm.sample(4, 10, seed=0)
    torch.testing.assert_close(
        HMM.from_pretrained(tmp_path / "ours").log_likelihood(texts), hmm.log_likelihood(texts)
    )


def test_errors_have_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    failed = run("hmm", "show", tmp_path / "empty")
    assert failed.returncode == 1
    assert failed.stderr.startswith("foretrace: ")
    assert "no config.json" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_sparse_form_larger_than_dense(folder: Path, tmp_path: Path) -> None:
    done = run("hmm", "sparsify", folder, "--out", tmp_path / "sparse", "--tolerance", 1e-5)
    assert "Raise --tolerance" in done.stdout


def test_output_path_is_a_file(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    failed = run("hmm", "sparsify", folder, "--out", tmp_path / "file")
    assert failed.returncode == 1
    assert failed.stderr.startswith("foretrace: ")


def test_wrong_usage_exits_with_2() -> None:
    assert run("hmm", "show").returncode == 2
    assert run("nonsense").returncode == 2
