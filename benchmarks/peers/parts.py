"""The folder of what peers have trained, and the record of what training took."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foretrace import _io
from foretrace.errors import InvalidFileError

COMMAND = "python benchmarks/peers/run.py"


def part(attribute: str, name: str) -> Path:
    """Return the path of a trained part of an attribute, such as its expert."""
    return Path(os.environ["FORETRACE_RESULTS"]) / "peers" / "parts" / attribute / name


def require(path: Path) -> Path:
    """Return a path that must exist."""
    if not path.exists():
        raise InvalidFileError(f"There is no {path}. Train it with {COMMAND}.")
    return path


def checksum(file: Path) -> str:
    """Return a checksum of a file's content."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def size(path: Path) -> int:
    """Return the number of bytes of a file, or of the safetensors files of a folder."""
    files = path.glob("*.safetensors") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)


def inputs_identity(texts: Sequence[str], settings: object) -> str:
    """Return a checksum of what a part is made from."""
    content = json.dumps([list(texts), repr(settings)]).encode()
    return hashlib.sha256(content).hexdigest()


def is_made(path: Path, inputs: str) -> bool:
    """Return whether a part is complete; refuse one that was made from something else."""
    if not _record(path).is_file():
        return False
    if read_record(path)["inputs"] != inputs:
        raise InvalidFileError(
            f"{path} was made from other texts or settings. Remove its folder to make it again."
        )
    return True


def write_record(path: Path, inputs: str, seconds: float, texts: int) -> None:
    """Record what it took to make a part, and how large it is. This completes the part."""
    record = {"inputs": inputs, "seconds": seconds, "texts": texts, "bytes": size(path)}
    _io.write_json(_record(path), record)


def read_record(path: Path) -> dict[str, Any]:
    """Read the record of a part."""
    return _io.read_json(require(_record(path)))


def _record(path: Path) -> Path:
    return path.with_name(f"{path.name}.record.json")
