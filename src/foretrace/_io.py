"""Safetensors and JSON on disk: read in place, written aside and renamed, or not at all."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from foretrace.errors import InvalidFileError


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """Give a scratch path beside `path`; rename it to `path` once it is whole and on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{uuid4().hex}.partial")
    try:
        scratch.touch()
        mode = scratch.stat().st_mode  # what the user's umask grants; writers may narrow it
        yield scratch
        scratch.chmod(mode)
        _flush_to_disk(scratch)
        scratch.replace(path)
        _flush_to_disk(path.parent)
    finally:
        scratch.unlink(missing_ok=True)


def _flush_to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` as readable JSON."""
    with written_aside(path) as scratch:
        scratch.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise InvalidFileError(
            f"{path.parent} has no {path.name}. Give the folder that was saved, or save it again."
        ) from None
    except ValueError as error:
        raise InvalidFileError(f"{path} is not JSON ({error}). Save it again.") from error
    if not isinstance(content, dict):
        raise InvalidFileError(f"{path} holds {type(content).__name__}, not an object. Save again.")
    return content


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors as one safetensors file."""
    on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with written_aside(path) as scratch:
        save_file(on_host, scratch, dict(metadata))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Map a safetensors file into memory: (tensors, metadata). Pages are read when touched."""
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            return {name: file.get_tensor(name) for name in names}, file.metadata() or {}
    except FileNotFoundError:
        raise InvalidFileError(
            f"{path.parent} has no {path.name}. Give the folder that was saved, or save it again."
        ) from None
    except SafetensorError as error:
        raise InvalidFileError(
            f"{path} is damaged or cut short ({error}). Copy, download or save it again."
        ) from error


def take_tensor(
    tensors: Mapping[str, Tensor], name: str, shape: Sequence[int], path: Path
) -> Tensor:
    """Take one tensor out of a file's, and insist on its shape."""
    if name not in tensors:
        raise InvalidFileError(
            f"{path} has no tensor '{name}' (it has {', '.join(sorted(tensors)) or 'none'}). "
            f"Save it again."
        )
    found = tuple(tensors[name].shape)
    if found != tuple(shape):
        raise InvalidFileError(
            f"{path}: tensor '{name}' has shape {found}, but {tuple(shape)} was expected. "
            f"The file and its config.json do not belong together: save or download both again."
        )
    return tensors[name]


def locate(source: str | os.PathLike[str], revision: str | None, patterns: Sequence[str]) -> Path:
    """Find a local folder, or fetch a repository of the Hugging Face hub and give its folder."""
    folder = Path(source)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        fetched = snapshot_download(str(source), revision=revision, allow_patterns=list(patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise InvalidFileError(
            f"'{source}' is neither a local folder nor a hub repository that can be reached "
            f"({reason[0]}). Check the spelling, the network, and `hf auth login` if it is private."
        ) from error
    return Path(fetched)
