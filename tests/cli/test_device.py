"""The device of a command, and the dtype of its language model."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from foretrace import cli
from foretrace.cli.device import choose_device, choose_dtype
from foretrace.cli.model_loading import load_lm
from foretrace.errors import InvalidInputError


@pytest.fixture(params=["float32", "bfloat16"])
def native_dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The dtype of a simulated CPU, with and without bfloat16 instructions."""
    flag = "amx_bf16" if request.param == "bfloat16" else None
    monkeypatch.setattr("foretrace._hardware._bfloat16_flag", lambda: flag)
    return str(request.param)


def test_auto_depends_on_the_hardware(native_dtype: str) -> None:
    assert choose_dtype("auto", "cpu") == native_dtype
    assert choose_dtype("float16", "cpu") == "float16"


def test_lm_is_loaded_in_the_dtype_of_the_hardware(
    native_dtype: str, tiny_lm: Path, tmp_path: Path
) -> None:
    """The dtype of the checkpoint does not matter."""
    lm, tokenizer = load_lm(str(tiny_lm), "auto", "cpu")
    assert lm.dtype is getattr(torch, native_dtype)
    stored = lm.to(torch.float16)  # type: ignore[arg-type]
    stored.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert load_lm(str(tmp_path), "auto", "cpu")[0].dtype is getattr(torch, native_dtype)
    assert load_lm(str(tmp_path), "float16", "cpu")[0].dtype is torch.float16


def test_distill_uses_the_dtype_of_the_hardware(
    native_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {}

    def plan_double(*_: Any, **options: Any) -> None:
        settings.update(options)
        raise InvalidInputError("The settings are known.")

    monkeypatch.setattr("foretrace.distill.plan.plan", plan_double)
    arguments = ["distill", str(tmp_path), "--out", str(tmp_path), "--plan", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["foretrace", *arguments])
    with pytest.raises(SystemExit):
        cli.main()
    assert settings["lm"].dtype == native_dtype


def test_unknown_devices_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInputError, match="There is no device 'abacus'"):
        choose_device("abacus")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidInputError, match="Use --device cpu"):
        choose_device("cuda")
    assert choose_device("auto") == "cpu"
