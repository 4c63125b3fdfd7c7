"""Files in object stores, by URL: `s3://bucket/key`, `gs://...`, `abfs://...`.

A path of `universal_pathlib` stands for such a file, and has the methods of `pathlib.Path`. Object
stores show an object when its upload is complete, so that a file is complete or absent. A file is
read from a copy in a local cache, which can be mapped into memory.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast
from uuid import uuid4

from foretrace.errors import InvalidFileError, InvalidInputError, reason

STORES = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "oci")
CACHE_BYTES = 32 << 30  # and at most half of the free disk
HEADER_BYTES = 1 << 16  # of a shard: more than its header has


def to_path(source: str | os.PathLike[str]) -> Path:
    """Return a path: of the local disk, or of an object store if `source` is a URL."""
    if is_remote(source) or "://" not in str(source):
        return cast(Path, source) if is_remote(source) else Path(source)
    store = str(source).partition("://")[0]
    if store not in STORES:
        raise InvalidInputError(
            f"{source}: '{store}' is not an object store that shows complete files only. Use one "
            f"of {', '.join(STORES)}, or mount it as a folder."
        )
    try:
        from upath import UPath

        # A listing that is kept would not show what other workers write.
        path: Any = UPath(str(source), use_listings_cache=False)
        path.fs  # noqa: B018  imports the package of the store
    except ImportError as error:
        raise InvalidInputError(
            f"{source} needs a package ({error}): pip install 'foretrace[s3]'; for other stores "
            f"universal_pathlib and their package, such as gcsfs."
        ) from None
    return cast(Path, path)


def is_remote(path: object) -> bool:
    """Return whether a path is in an object store."""
    return hasattr(path, "fs") and not isinstance(path, Path)


@contextmanager
def uploaded(path: Any, *, replace: bool) -> Iterator[Path]:
    """Yield a local path to write to, and upload the file afterwards."""
    if not replace and path.exists():
        raise FileExistsError(str(path))
    with TemporaryDirectory(prefix="foretrace-") as folder:
        scratch = Path(folder) / path.name
        scratch.touch()
        yield scratch
        with _explained(path, "written"):
            path.fs.put_file(str(scratch), path.path)


def local_copy(path: Any) -> Path:
    """Fetch a file into the cache, unless it is there, and return its local path."""
    with _explained(path, "read"):
        info = path.fs.info(path.path)
        identity = [str(path), info["size"], str(info.get("ETag", info.get("mtime")))]
        copy = _cache_folder() / sha256(json.dumps(identity).encode()).hexdigest()
        try:
            os.utime(copy)  # the least recently used go first
        except FileNotFoundError:
            _make_room(copy.parent, info["size"])
            scratch = copy.with_name(f"{copy.name}.{uuid4().hex}")
            try:
                path.fs.get_file(path.path, str(scratch))
                scratch.replace(copy)
            finally:
                scratch.unlink(missing_ok=True)
    return copy


def read_header(path: Any) -> dict[str, Any]:
    """Read the header of a safetensors file, and check that the file is as long as it says."""
    with _explained(path, "read"):
        size = path.fs.info(path.path)["size"]
        content = path.fs.cat_file(path.path, start=0, end=min(size, HEADER_BYTES))
    length = int.from_bytes(content[:8], "little")
    try:
        header: dict[str, Any] = json.loads(content[8 : 8 + length])
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
        if size == 8 + length + max(ends, default=0):
            return header
    except (ValueError, LookupError, TypeError, AttributeError):
        pass
    raise InvalidFileError(f"{path} is damaged or cut short. Remove it or make it again.")


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "foretrace" / "objects"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _make_room(folder: Path, size: int) -> None:
    """Remove the files that were not used for longest, until there is room for `size` bytes.

    A process that has mapped such a file into memory keeps its content.
    """
    files = []
    for path in folder.iterdir():
        try:
            files.append((path.stat().st_mtime, path.stat().st_size, path))
        except FileNotFoundError:  # removed by another process
            continue
    used = sum(bytes_ for _, bytes_, _ in files)
    limit = min(CACHE_BYTES, (shutil.disk_usage(folder).free + used) // 2)
    for _, bytes_, path in sorted(files):
        if used + size <= limit:
            break
        path.unlink(missing_ok=True)
        used -= bytes_


@contextmanager
def _explained(path: Any, verb: str) -> Iterator[None]:
    """Raise an OSError for errors of the store's client; a missing file stays one."""
    try:
        yield
    except (FileNotFoundError, InvalidFileError):
        raise
    except Exception as error:  # of the client, the transport or a proxy
        raise OSError(
            f"{path} cannot be {verb} ({reason(error)}). Check the network and the credentials; "
            f"the same command resumes."
        ) from error
