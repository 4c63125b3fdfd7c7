"""Writes are atomic, and damaged files raise InvalidFileError."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from foretrace import _io
from foretrace.errors import InvalidFileError, InvalidInputError


def test_a_failed_write_keeps_the_old_file_and_removes_the_temporary_one(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    _io.write_json(path, {"version": 1})
    with pytest.raises(InvalidInputError, match="cannot be written"):
        _io.write_json(path, {"version": object()})
    with pytest.raises(UnicodeEncodeError), _io.atomic_write(path) as scratch:
        scratch.write_text("half \ud800")
    assert _io.read_json(path) == {"version": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_replacing_a_file_does_not_change_tensors_that_were_read(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    _io.write_tensors(path, {"a": torch.arange(4.0)}, {"version": "old"})
    old, metadata = _io.read_tensors(path)
    assert metadata == {"version": "old"}
    _io.write_tensors(path, {"a": torch.zeros(4)}, {})
    assert torch.equal(old["a"], torch.arange(4.0))  # still mapped to the old file
    assert not _io.read_tensors(path)[0]["a"].any()


def test_non_contiguous_views_are_written(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    square = torch.arange(6.0).reshape(2, 3)
    _io.write_tensors(path, {"transposed": square.T}, {})
    assert torch.equal(_io.read_tensors(path)[0]["transposed"], square.T)


def test_missing_folders_are_created(tmp_path: Path) -> None:
    _io.write_json(tmp_path / "a" / "b" / "c.json", {})
    assert (tmp_path / "a" / "b" / "c.json").exists()


def test_files_have_the_rights_of_the_umask(tmp_path: Path) -> None:
    _io.write_json(tmp_path / "a.json", {})
    _io.write_tensors(tmp_path / "a.safetensors", {"a": torch.ones(1)}, {})
    (tmp_path / "plain").touch()
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000], ids=["arrays", "objects"])
def test_deeply_nested_json_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(InvalidFileError, match="not JSON"):
        _io.read_json(tmp_path / "a.json")


def test_a_deeply_nested_line_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n' + "[" * 200_000 + '\n{"a": 2}\n')
    assert _io.read_lines(tmp_path / "a.jsonl") == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    "dtype",
    [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint64],
    ids=str,
)
def test_dtypes_that_few_operators_support_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    save_file({"a": torch.ones(2), "weights": torch.ones(2).to(dtype)}, path)
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(InvalidFileError, match=f"'weights' has dtype {name}"):
        _io.read_tensors(path)
