"""Devices, dtypes, models and prompts of commands."""

import json
import lzma
import os
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants

from foretrace import cli
from foretrace.cli.loading import (
    choose_device,
    choose_dtype,
    find_model,
    load_lm,
    read_chats,
    read_prompts,
)
from foretrace.errors import InvalidFileError, InvalidInputError


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


class SessionDouble:
    """Counts requests; fails if there is an error to raise."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.requests = error, 0

    def head(self, url: str, **_: Any) -> None:
        self.requests += 1
        if self.error is not None:
            raise self.error


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn offline mode off, and restore it after the test."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def use(session: SessionDouble, monkeypatch: pytest.MonkeyPatch) -> SessionDouble:
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: session)
    return session


@pytest.mark.usefixtures("online")
def test_an_unreachable_hub_switches_to_offline_mode(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = use(SessionDouble(OSError("no route")), monkeypatch)
    find_model("owner/model")
    assert "cannot be reached (no route)" in capsys.readouterr().err
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert constants.HF_HUB_OFFLINE
    find_model("owner/other")
    assert session.requests == 1


@pytest.mark.usefixtures("online")
def test_a_reachable_hub_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    session = use(SessionDouble(), monkeypatch)
    find_model("owner/model")
    assert session.requests == 1
    assert not constants.HF_HUB_OFFLINE


@pytest.mark.usefixtures("online")
def test_local_paths_send_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = use(SessionDouble(OSError()), monkeypatch)
    find_model(str(tmp_path))
    for missing in ("./nolm", "../nolm/x", str(tmp_path / "missing")):
        with pytest.raises(InvalidFileError, match=f"no file or folder {missing}"):
            find_model(missing)
    assert session.requests == 0


def test_file_formats(tmp_path: Path) -> None:
    (tmp_path / "plain.txt").write_text("one prompt\n\n  another\n")
    assert read_prompts(tmp_path / "plain.txt") == ["one prompt", "  another"]
    with lzma.open(tmp_path / "many.jsonl.xz", "wt") as file:
        file.write('{"prompt": "a", "text": "x"}\n{"prompt": "b"}\n')
    assert read_prompts(tmp_path / "many.jsonl.xz") == ["a", "b"]
    (tmp_path / "texts.csv").write_text("text\none\n")
    assert read_prompts(tmp_path / "texts.csv") == ["one"]


@pytest.mark.parametrize("content", ["", '{"label": 1}\n', "not json\n", "[1]\n"])
def test_files_without_prompts_are_errors(content: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(InvalidFileError, match=r"row|line"):
        read_prompts(path)


def test_chats_are_messages_or_lines(tmp_path: Path) -> None:
    (tmp_path / "plain.txt").write_text("hello\n")
    assert read_chats(tmp_path / "plain.txt") == [[{"role": "user", "content": "hello"}]]
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": messages}))
    assert read_chats(tmp_path / "chats.jsonl") == [messages]


@pytest.mark.parametrize("messages", ["hello", [], ["hello"], 3])
def test_other_messages_are_errors(messages: object, tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": messages}))
    with pytest.raises(InvalidFileError, match="'messages' of row 1"):
        read_chats(tmp_path / "chats.jsonl")
