"""`foretrace serve`: the command line of vLLM."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from foretrace import cli
from foretrace.cli import serve
from foretrace.context import Probe, read_head
from foretrace.hmm import HMM


def vllm_command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[str]:
    """Run `foretrace serve`; return the command that would replace the process."""
    commands: list[list[str]] = []
    monkeypatch.setattr(serve, "_require_vllm", lambda: None)
    monkeypatch.setattr(os, "execv", lambda _, command: commands.append(command))
    monkeypatch.setattr(os, "environ", {**os.environ, "PROMETHEUS_MULTIPROC_DIR": "unused"})
    monkeypatch.setattr(sys, "argv", ["foretrace", "serve", *arguments])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert not stopped.value.code
    return commands[0]


@pytest.mark.parametrize(("flag", "dtype"), [(None, "float32"), ("amx_bf16", "bfloat16")])
def test_dtype_of_the_hardware_is_passed_to_vllm(
    flag: str | None, dtype: str, steered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foretrace._hardware._bfloat16_flag", lambda: flag)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    command = vllm_command(monkeypatch, *steered)
    assert command[command.index("--dtype") + 1] == dtype


@pytest.mark.parametrize("option", [["--dtype", "half"], ["--dtype=half"]])
def test_dtype_of_the_user_is_passed_to_vllm(
    option: list[str], steered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = vllm_command(monkeypatch, *steered, *option, "--port", "8001")
    assert command.count("--dtype") == 1
    assert command[command.index("--dtype") + 1] == "half"
    assert command[-2:] == ["--port", "8001"]


def test_an_hmm_is_optional(steered: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    at = steered.index("--hmm")
    vllm_command(monkeypatch, *steered[:at], *steered[at + 2 :])
    frequencies = HMM.from_pretrained(os.environ["FORETRACE_SERVE_HMM"])
    assert frequencies.num_states == 1
    assert frequencies.config.tokenizer_fingerprint is not None
    again = os.environ["FORETRACE_SERVE_HMM"]
    vllm_command(monkeypatch, *steered[:at], *steered[at + 2 :])
    assert os.environ["FORETRACE_SERVE_HMM"] == again
    assert Path(again).parent.stat().st_mode & 0o777 == 0o700


def test_the_probe_must_be_of_the_lm(
    steered: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    head, file = read_head(steered[0]), tmp_path / "probe.safetensors"
    Probe.build(head).save(file)
    vllm_command(monkeypatch, *steered, "--probe", str(file))
    assert os.environ["FORETRACE_SERVE_PROBE"] == str(file)
    Probe.build(replace(head, scale=2.0), source="another").save(file)
    with pytest.raises(AssertionError):
        vllm_command(monkeypatch, *steered, "--probe", str(file))
    assert "The probe was made for another" in " ".join(capsys.readouterr().err.split())
