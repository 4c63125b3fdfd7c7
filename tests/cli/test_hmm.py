"""`foretrace hmm`."""

from pathlib import Path

import pytest
import torch

from foretrace.hmm import HMM
from forked import Run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    HMM.random(16, 200, eos_token_id=7, seed=1).save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


def test_show(run: Run, folder: Path) -> None:
    shown = run("hmm", "show", folder)
    assert shown.code == 0
    assert "16" in shown.out
    assert "end of text" in shown.out


def test_sparsify_then_show(run: Run, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "sparse"
    done = run("hmm", "sparsify", folder, "--out", out, "--tolerance", 0.1, "--dtype", "bfloat16")
    assert done.code == 0, done.err
    assert f"written to {out}" in done.out.replace("\n", "")
    assert "bfloat16" in done.out  # the dtype of the output, not of the input
    loaded = HMM.from_pretrained(out)
    assert loaded.dtype == torch.bfloat16
    assert loaded.emission.kind == "sparse+background"
    assert "nats per token" in run("hmm", "show", out).out


def test_convert(run: Run, folder: Path, tmp_path: Path) -> None:
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
    assert done.code == 0, done.err
    texts = hmm.sample(4, 10, seed=0)
    torch.testing.assert_close(
        HMM.from_pretrained(tmp_path / "ours").log_likelihood(texts), hmm.log_likelihood(texts)
    )


def test_errors_have_no_traceback(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    failed = run("hmm", "show", tmp_path / "empty")
    assert failed.code == 1
    assert failed.err.startswith("foretrace: ")
    assert "no config.json" in failed.err
    assert "Traceback" not in failed.err


def test_sparse_form_larger_than_dense(run: Run, folder: Path, tmp_path: Path) -> None:
    done = run("hmm", "sparsify", folder, "--out", tmp_path / "sparse", "--tolerance", 1e-5)
    assert "Raise --tolerance" in done.out


def test_output_path_is_a_file(run: Run, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    failed = run("hmm", "sparsify", folder, "--out", tmp_path / "file")
    assert failed.code == 1
    assert failed.err.startswith("foretrace: ")
