"""Read and write safetensors and JSON files, on disk or in an object store.

Writes are atomic, reads are memory-mapped.
"""

import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from foretrace import _remote
from foretrace.errors import InvalidFileError, InvalidInputError, reason

Item = TypeVar("Item")
THREADS = 16  # requests at once to an object store
CHUNK = 1024  # files whose headers are read at once
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")  # no part begins with a dot, as a path may
# Few operators support the other dtypes (complex, float8, uint64).
READABLE_DTYPES = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint32,
        torch.uint16,
        torch.uint8,
        torch.bool,
    }
)


@contextmanager
def atomic_write(path: Path, *, replace: bool = True) -> Iterator[Path]:
    """Yield a temporary path next to `path`, and rename it to `path` after it is flushed to disk.

    Without `replace`, keep an existing file and raise FileExistsError. In an object store, upload
    the file instead.
    """
    if _remote.is_remote(path):
        with _remote.uploaded(path, replace=replace) as scratch:
            yield scratch
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{uuid4().hex}.partial")
    try:
        scratch.touch()
        mode = (
            scratch.stat().st_mode
        )  # as the umask allows; some writers create files with fewer rights
        yield scratch
        scratch.chmod(mode)
        _flush_to_disk(scratch)
        if replace:
            scratch.replace(path)
        else:
            path.hardlink_to(scratch)  # unlike a rename, a link never replaces a file
        _flush_to_disk(path.parent)
    finally:
        scratch.unlink(missing_ok=True)


def read_ahead(items: Iterator[Item]) -> Iterator[Item]:
    """Compute the next item in a thread while the current one is used."""
    with ThreadPoolExecutor(1) as reader:
        upcoming = reader.submit(next, items, None)
        while (item := upcoming.result()) is not None:
            upcoming = reader.submit(next, items, None)
            yield item


def _flush_to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def checksum(tensor: Tensor) -> int:
    """Compute the CRC-32 of a tensor's bytes, a few megabytes at a time."""
    crc = 0
    for chunk in torch.split(tensor.detach().reshape(-1), 1 << 20):
        crc = zlib.crc32(chunk.cpu().contiguous().view(torch.uint8).numpy().data, crc)
    return crc


def checksums(tensors: Iterable[Tensor]) -> str:
    """Return an identifier of the content of several tensors."""
    return "-".join(f"{checksum(tensor):08x}" for tensor in tensors)


def append_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append JSON objects to a JSON Lines file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(_lines(rows))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a JSON Lines file; skip incomplete lines. A missing file has no rows."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text("utf-8", "replace").split("\n")[:-1]:
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError):  # cut short by a crash, or nested too deeply
            continue
    return rows


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a JSON Lines file, replacing an existing one."""
    with atomic_write(path) as scratch:
        scratch.write_text(_lines(rows), "utf-8")


def _lines(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` as indented JSON."""
    text = to_json(path, content)
    with atomic_write(path) as scratch:
        scratch.write_text(text, "utf-8")


def to_json(path: Path, content: Mapping[str, Any]) -> str:
    """Format `content` as indented JSON; `path` is for the error message."""
    try:
        return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    except (TypeError, ValueError, RecursionError) as error:  # no JSON, or nested without end
        raise InvalidInputError(
            f"{path.name} cannot be written: {error}. Use numbers, strings, lists and dictionaries."
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds one object."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise InvalidFileError(
            f"{path.parent} has no {path.name}. Pass the folder that was saved, or save it again."
        ) from None
    except (ValueError, RecursionError) as error:
        raise InvalidFileError(f"{path} is not JSON ({error}). Save it again.") from error
    if not isinstance(content, dict):
        raise InvalidFileError(f"{path} holds {type(content).__name__}, not an object. Save again.")
    return content


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], *, replace: bool = True
) -> None:
    """Write a safetensors file."""
    with atomic_write(path, replace=replace) as scratch:
        _save_tensors(scratch, tensors, metadata)


def write_tensors_and_json(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    json_path: Path,
    content: Mapping[str, Any],
) -> None:
    """Write two files that belong together: both are complete before either is renamed."""
    text = to_json(json_path, content)
    with atomic_write(path) as scratch, atomic_write(json_path) as json_scratch:
        _save_tensors(scratch, tensors, metadata)
        json_scratch.write_text(text, "utf-8")


def _save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    on_host: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        saved = tensor.detach().cpu().contiguous()
        if saved.untyped_storage().data_ptr() in storages:  # safetensors refuses shared memory
            saved = saved.clone()
        storages.add(saved.untyped_storage().data_ptr())
        on_host[name] = saved
    try:
        save_file(on_host, path, dict(metadata))
    except SafetensorError as error:
        raise OSError(
            f"{path.parent} cannot be written to ({error}). If its disk is full, free some space "
            f"and run the command again."
        ) from error


def tensor_names(path: Path) -> list[str]:
    """Return the names of the tensors in a safetensors file."""
    with _opened(path) as file:
        return list(file.keys())


def read_tensors(
    path: Path, names: Sequence[str] | None = None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Map a safetensors file into memory and return (tensors, metadata): by default all tensors."""
    with _opened(path) as file:
        wanted = list(file.keys()) if names is None else names
        tensors = {name: file.get_tensor(name) for name in wanted}
        metadata = file.metadata() or {}
    for name, tensor in tensors.items():
        if tensor.dtype not in READABLE_DTYPES:
            raise InvalidFileError(
                f"{path}: tensor '{name}' has dtype {str(tensor.dtype).removeprefix('torch.')}, "
                f"which foretrace does not read. Convert it, for example to float32, and save it "
                f"again."
            )
    return tensors, metadata


def parse_header(header: str, problem: str) -> tuple[Any, dict[str, Any]]:
    """Return the format version and the other content of a JSON header.

    Raise InvalidFileError with `problem` if it is no such header.
    """
    try:
        content: dict[str, Any] = json.loads(header)
        return content.pop("format_version"), content
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InvalidFileError(problem) from None


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file; explain the error if it is missing or damaged."""
    try:
        with safe_open(_local(path), framework="pt") as file:
            yield file
    except FileNotFoundError:
        raise InvalidFileError(
            f"{path.parent} has no {path.name}. Pass the folder that was saved, or save it again."
        ) from None
    except SafetensorError as error:
        raise InvalidFileError(
            f"{path} is damaged or cut short ({error}). Copy, download or save it again."
        ) from error


def _local(path: Path) -> Path:
    return _remote.local_copy(path) if _remote.is_remote(path) else path


def read_header(path: Path, name: str) -> tuple[tuple[int, ...], dict[str, str]]:
    """Read the shape of one tensor, and the metadata, without reading the tensors."""
    if _remote.is_remote(path):
        header = _remote.read_header(path)
        return tuple(header[name]["shape"]), header.get("__metadata__", {})
    try:
        with safe_open(path, framework="pt") as file:
            return tuple(file.get_slice(name).get_shape()), file.metadata() or {}
    except SafetensorError as error:
        raise InvalidFileError(
            f"{path} is damaged or cut short ({error}). Remove it or make it again."
        ) from error


def read_headers(
    paths: Iterable[Path], name: str
) -> Iterator[tuple[tuple[int, ...], dict[str, str]]]:
    """Read the headers of many files, several at once."""
    return _in_threads(lambda path: read_header(path, name), paths)


def _in_threads(function: Callable[[Path], Item], paths: Iterable[Path]) -> Iterator[Item]:
    remaining = iter(paths)
    with ThreadPoolExecutor(THREADS) as pool:
        while chunk := list(islice(remaining, CHUNK)):
            yield from pool.map(function, chunk)


def remove_partial_files(folder: Path) -> None:
    """Remove what writers left that were killed; no other process may write to the folder."""
    if not _remote.is_remote(folder):  # an upload that was cut short leaves nothing
        for path in folder.glob(".*.partial"):
            path.unlink(missing_ok=True)


def missing_files(paths: Iterable[Path]) -> list[int]:
    """Return the positions of safetensors files that do not exist; remove those that are cut short.

    A file is cut short if a disk lost its end, or if a copy was interrupted.
    """
    complete = _in_threads(_is_complete, paths)
    return [position for position, is_complete in enumerate(complete) if not is_complete]


def _is_complete(path: Path) -> bool:
    """Return whether a safetensors file is complete; remove it if it is cut short."""
    try:
        if _remote.is_remote(path):
            _remote.read_header(path)
        else:
            with safe_open(path, framework="pt"):
                pass
    except FileNotFoundError:
        return False
    except (InvalidFileError, SafetensorError):
        path.unlink(missing_ok=True)
        return False
    return True


def take_tensor(
    tensors: Mapping[str, Tensor], name: str, shape: Sequence[int], path: Path
) -> Tensor:
    """Return the tensor `name` of a file; raise if it is missing or has another shape."""
    if name not in tensors:
        raise InvalidFileError(
            f"{path} has no tensor '{name}' (it has {', '.join(sorted(tensors)) or 'none'}). "
            f"Save it again."
        )
    actual = tuple(tensors[name].shape)
    if actual != tuple(shape):
        raise InvalidFileError(
            f"{path}: tensor '{name}' has shape {actual}, but {tuple(shape)} was expected. "
            f"The file belongs to another model or is damaged: save or download it again."
        )
    return tensors[name]


def require_existing_path(source: str | os.PathLike[str]) -> None:
    """Raise if nothing is at a path that cannot be a hub id either."""
    name = os.fspath(source)
    if not Path(source).exists() and not HUB_ID.fullmatch(name):
        raise InvalidFileError(
            f"There is no file or folder {name}. Check the spelling, or pass an id on the hub, "
            f"such as HuggingFaceTB/SmolLM2-135M."
        )


def locate(source: str | os.PathLike[str], revision: str | None, patterns: Sequence[str]) -> Path:
    """Return a folder, or download a Hugging Face hub repository and return its folder."""
    folder = _remote.to_path(source)
    if _remote.is_remote(folder) or folder.is_dir():
        return folder
    require_existing_path(source)
    from huggingface_hub import snapshot_download

    try:
        fetched = snapshot_download(str(source), revision=revision, allow_patterns=list(patterns))
    except Exception as error:  # of the hub, the transport or a proxy
        raise InvalidFileError(
            f"'{source}' is neither a local folder nor a hub repository that can be reached "
            f"({reason(error)}). Check the spelling, the network, and `hf auth login` if it is "
            f"private."
        ) from error
    return Path(fetched)


def publish(folder: Path, repository: str, patterns: Sequence[str]) -> str:
    """Upload files of a folder to a Hugging Face hub repository and return its URL."""
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        url = api.create_repo(repository, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, allow_patterns=list(patterns))
    except Exception as error:  # of the hub, the transport or a proxy
        raise InvalidInputError(
            f"{folder} cannot be published as '{repository}' ({reason(error)}). The folder is "
            f"complete; check the network and `hf auth login`, and run the command again."
        ) from error
    return str(url)
