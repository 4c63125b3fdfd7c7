"""`foretrace probe`."""

from pathlib import Path

from foretrace.context import Probe
from forked import Run


def test_a_probe_is_measured_and_written(run: Run, tiny_lm: Path, tmp_path: Path) -> None:
    file = tmp_path / "probe.safetensors"
    done = run("probe", tiny_lm, "--out", file, "--features", 8, "--dtype", "float32")
    assert done.code == 0, done.err
    for text in ("condition number", "states of the LM, float32", f"written to {file}"):
        assert text in done.out
    probe = Probe.load(file)
    assert probe.features.shape == (64, 8)
    assert 0 not in probe.tokens  # the end of text
    assert probe.config.source == tiny_lm.name
    assert probe.config.errors["states of the LM, float32"] < 1e-4


def test_a_probe_for_attributes_of_another_lm(run: Run, tiny_lm: Path, tmp_path: Path) -> None:
    command = ["probe", tiny_lm, "--features", 8, "--no-run"]
    assert run(*command, "--out", tmp_path / "p").code == 0
    for original in (tiny_lm, tmp_path / "p"):
        done = run(*command, "--out", tmp_path / "q", "--for", original)
        assert done.code == 0, done.err
        config = Probe.load(tmp_path / "q").config
        assert config.original == config.fingerprint


def test_a_probe_of_files_alone(run: Run, tiny_lm: Path, tmp_path: Path) -> None:
    done = run("probe", tiny_lm, "--out", tmp_path / "p", "--features", 8, "--no-run")
    assert done.code == 0, done.err
    assert "synthetic states, bfloat16" in done.out
    assert "states of the LM" not in done.out


def test_errors_have_no_traceback(run: Run, tmp_path: Path) -> None:
    failed = run("probe", "no/such/folder", "--out", tmp_path / "p")
    assert failed.code == 1
    assert failed.err.startswith("foretrace: There is no file or folder")
    assert not (tmp_path / "p").exists()
