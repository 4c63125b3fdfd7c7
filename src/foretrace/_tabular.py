"""Tables of texts that people bring: JSON Lines, CSV, Parquet or plain lines, or compressed."""

import bz2
import csv
import gzip
import json
import lzma
import math
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, Any

from foretrace.errors import InvalidFileError, reason

Row = dict[str, Any]

OPENERS: dict[str, Callable[..., IO[str]]] = {".xz": lzma.open, ".gz": gzip.open, ".bz2": bz2.open}
LINES = {".jsonl", ".ndjson", ".json"}
PLAIN = ".txt"
SEPARATORS = {".csv": ",", ".tsv": "\t"}
PARQUET = ".parquet"
WORDS = {"true": 1, "false": 0}
SURROGATE = re.compile("[\ud800-\udfff]")
LONGEST_FIELD = 1 << 30  # characters; the module's own limit is less than a long article
# What damaged files raise while they are unpacked, decoded or parsed.
DAMAGE = (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error, csv.Error, RecursionError)


def read_rows(path: Path, columns: Sequence[str] = ()) -> list[Row]:
    """Read a table, by the ending of its name: one dictionary per row.

    Plain lines (.txt) are a table with the one column `text`. Of Parquet, only the given columns
    are read, if any are.
    """
    if not path.is_file():
        raise InvalidFileError(f"There is no file {path}. Check the spelling.")
    endings = [ending.lower() for ending in path.suffixes[-2:]]
    opener = OPENERS.get(endings[-1]) if endings else None
    kind = endings[-2] if opener and len(endings) > 1 else (endings or [""])[-1]
    if kind == PARQUET and opener is None:
        return _parquet(path, columns)
    if kind not in {*LINES, *SEPARATORS, PLAIN}:
        raise InvalidFileError(
            f"{path} is no table that can be read: its name must end in "
            f"{', '.join(sorted({*LINES, *SEPARATORS, PLAIN}))} (these also with "
            f"{', '.join(OPENERS)}), or {PARQUET}."
        )
    try:
        with (opener or open)(path, "rt", encoding="utf-8-sig", newline="") as file:
            if kind == PLAIN:
                return [{"text": line.rstrip("\r\n")} for line in file if line.strip()]
            if kind in LINES:
                return _json_lines(file, path)
            return _csv(file, SEPARATORS[kind], path)
    except InvalidFileError:
        raise
    except DAMAGE as error:
        raise InvalidFileError(
            f"{path} cannot be read ({reason(error)}). It must be UTF-8 text, whole."
        ) from error


def column(rows: Sequence[Row], name: str, path: Path) -> list[Any]:
    """Take one column of a table; every row must have it."""
    if not rows:
        raise InvalidFileError(f"{path} has no rows.")
    for number, row in enumerate(rows, 1):
        if row.get(name) is None:
            raise InvalidFileError(
                f"{path}: row {number} has no '{name}'; it has "
                f"{', '.join(key for key in row if row[key] is not None) or 'nothing'}. Say which "
                f"columns to use, or complete the row."
            )
        if isinstance(row[name], str) and SURROGATE.search(row[name]):
            raise InvalidFileError(
                f"{path}: '{name}' of row {number} holds half of a character (a lone surrogate). "
                f"Write it again in UTF-8."
            )
    return [row[name] for row in rows]


def texts(rows: Sequence[Row], name: str, path: Path) -> list[str]:
    """Take a column of texts."""
    found = column(rows, name, path)
    for number, value in enumerate(found, 1):
        if not isinstance(value, str):
            raise InvalidFileError(
                f"{path}: '{name}' of row {number} is {type(value).__name__}, not text."
            )
    return found


def probabilities(rows: Sequence[Row], name: str, path: Path) -> list[float]:
    """Take a column of probabilities: also as text, as in CSV; true and false are 1 and 0."""
    found = []
    for number, value in enumerate(column(rows, name, path), 1):
        try:
            known = WORDS.get(value.lower(), value) if isinstance(value, str) else value
            found.append(float(known))
        except (TypeError, ValueError, OverflowError):
            found.append(math.nan)
        if not 0 <= found[-1] <= 1:
            raise InvalidFileError(
                f"{path}: '{name}' of row {number} is {str(value)[:40]!r}, not a probability in "
                f"[0, 1]. Divide scores by their greatest, or leave the row out."
            )
    return found


def _json_lines(lines: Iterable[str], path: Path) -> list[Row]:
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidFileError(
                f"{path}: line {number} is not JSON ({reason(error)}). Write one object per line."
            ) from error
        if not isinstance(row, dict):
            raise InvalidFileError(
                f"{path}: line {number} holds {type(row).__name__}, not an object. Write one "
                f"object per line."
            )
        rows.append(row)
    return rows


def _csv(file: IO[str], separator: str, path: Path) -> list[Row]:
    reader = csv.DictReader(file, delimiter=separator, strict=True)
    rows = []
    usual = csv.field_size_limit(LONGEST_FIELD)
    try:
        for row in reader:
            if None in row:
                raise InvalidFileError(
                    f"{path}: line {reader.line_num} has more fields than the first line names. "
                    f"Put quotes around texts that hold a {separator!r}."
                )
            rows.append(row)
    finally:
        csv.field_size_limit(usual)
    return rows


def _parquet(path: Path, columns: Sequence[str]) -> list[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise InvalidFileError(
            f"To read {path}, install pyarrow: pip install pyarrow. Or bring JSON Lines or CSV."
        ) from error
    try:
        file = pyarrow.parquet.ParquetFile(path)
        names = [name for name in file.schema_arrow.names if name in columns or not columns]
        if missing := [name for name in columns if name not in names]:
            raise InvalidFileError(
                f"{path} has no column {', '.join(missing)}; it has "
                f"{', '.join(file.schema_arrow.names)}. Say which columns to use."
            )
        rows: list[Row] = file.read(names).to_pylist()
    except InvalidFileError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise InvalidFileError(
            f"{path} is damaged, or not Parquet ({reason(error)}). Write it again."
        ) from error
    return rows
