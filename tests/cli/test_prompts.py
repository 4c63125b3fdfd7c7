"""Prompts from files of several formats."""

import json
import lzma
from pathlib import Path

import pytest

from foretrace.cli.prompts import read_chats, read_prompts
from foretrace.errors import InvalidFileError


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
