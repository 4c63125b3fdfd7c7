"""Nothing half-written ever stands under its final name."""

from pathlib import Path

import pytest
import torch

from foretrace import _io
from foretrace.errors import InvalidInputError


def test_a_failed_write_leaves_the_old_file_and_no_scraps(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    _io.write_json(path, {"version": 1})
    with pytest.raises(InvalidInputError, match="cannot be written"):
        _io.write_json(path, {"version": object()})
    with pytest.raises(UnicodeEncodeError), _io.written_aside(path) as scratch:
        scratch.write_text("half \ud800")
    assert _io.read_json(path) == {"version": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_tensors_are_mapped_and_the_file_is_free_to_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    _io.write_tensors(path, {"a": torch.arange(4.0)}, {"who": "old"})
    old, metadata = _io.read_tensors(path)
    assert metadata == {"who": "old"}
    _io.write_tensors(path, {"a": torch.zeros(4)}, {})
    assert torch.equal(old["a"], torch.arange(4.0))  # a reader keeps what it opened
    assert not _io.read_tensors(path)[0]["a"].any()


def test_views_are_written_as_they_look(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    square = torch.arange(6.0).reshape(2, 3)
    _io.write_tensors(path, {"flipped": square.T}, {})
    assert torch.equal(_io.read_tensors(path)[0]["flipped"], square.T)


def test_folders_are_made_as_needed(tmp_path: Path) -> None:
    _io.write_json(tmp_path / "a" / "b" / "c.json", {})
    assert (tmp_path / "a" / "b" / "c.json").exists()


def test_files_can_be_shared_as_the_umask_allows(tmp_path: Path) -> None:
    _io.write_json(tmp_path / "a.json", {})
    _io.write_tensors(tmp_path / "a.safetensors", {"a": torch.ones(1)}, {})
    (tmp_path / "plain").touch()
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1
