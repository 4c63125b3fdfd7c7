"""Read tables of texts from users: JSON Lines, CSV, Parquet or plain text, also compressed."""

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

DECOMPRESSORS: dict[str, Callable[..., IO[str]]] = {
    ".xz": lzma.open,
    ".gz": gzip.open,
    ".bz2": bz2.open,
}
JSON_LINES = {".jsonl", ".ndjson", ".json"}
PLAIN_TEXT = ".txt"
DELIMITERS = {".csv": ",", ".tsv": "\t"}
PARQUET = ".parquet"
TRUTH_VALUES = {"true": 1, "false": 0}
SURROGATE = re.compile("[\ud800-\udfff]")
MAX_FIELD_LENGTH = 1 << 30  # characters; the default of the csv module is 131,072
# Errors that damaged files raise while they are decompressed, decoded or parsed.
READ_ERRORS = (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error, csv.Error, RecursionError)


def read_rows(path: Path, columns: Sequence[str] = ()) -> list[Row]:
    """Read a file in the format of its suffix, and return one dictionary per row.

    The lines of a .txt file have the single column `text`. Of a Parquet file, only `columns` are
    read, unless there are none.
    """
    if not path.is_file():
        raise InvalidFileError(f"There is no file {path}. Check the spelling.")
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    opener = DECOMPRESSORS.get(suffixes[-1]) if suffixes else None
    suffix = suffixes[-2] if opener and len(suffixes) > 1 else (suffixes or [""])[-1]
    if suffix == PARQUET and opener is None:
        return _parquet(path, columns)
    if suffix not in {*JSON_LINES, *DELIMITERS, PLAIN_TEXT}:
        raise InvalidFileError(
            f"{path} has no known format: its name must end in "
            f"{', '.join(sorted({*JSON_LINES, *DELIMITERS, PLAIN_TEXT}))} (these also with "
            f"{', '.join(DECOMPRESSORS)}), or {PARQUET}."
        )
    try:
        with (opener or open)(path, "rt", encoding="utf-8-sig", newline="") as file:
            if suffix == PLAIN_TEXT:
                return [{"text": line.rstrip("\r\n")} for line in file if line.strip()]
            if suffix in JSON_LINES:
                return _json_lines(file, path)
            return _csv(file, DELIMITERS[suffix], path)
    except InvalidFileError:
        raise
    except READ_ERRORS as error:
        raise InvalidFileError(
            f"{path} cannot be read ({reason(error)}). It must be complete UTF-8 text."
        ) from error


def column(rows: Sequence[Row], name: str, path: Path) -> list[Any]:
    """Return one column; raise unless every row has it."""
    if not rows:
        raise InvalidFileError(f"{path} has no rows.")
    for number, row in enumerate(rows, 1):
        if row.get(name) is None:
            raise InvalidFileError(
                f"{path}: row {number} has no '{name}'; it has "
                f"{', '.join(key for key in row if row[key] is not None) or 'nothing'}. Name the "
                f"columns to use, or complete the row."
            )
        if isinstance(row[name], str) and SURROGATE.search(row[name]):
            raise InvalidFileError(
                f"{path}: '{name}' of row {number} holds half of a character (a lone surrogate). "
                f"Save the file again in UTF-8."
            )
    return [row[name] for row in rows]


def texts(rows: Sequence[Row], name: str, path: Path) -> list[str]:
    """Return a column of texts."""
    values = column(rows, name, path)
    for number, value in enumerate(values, 1):
        if not isinstance(value, str):
            raise InvalidFileError(
                f"{path}: '{name}' of row {number} is {type(value).__name__}, not text."
            )
    return values


def probabilities(rows: Sequence[Row], name: str, path: Path) -> list[float]:
    """Return a column of numbers in [0, 1]. Text is parsed; true and false are 1 and 0."""
    numbers: list[float] = []
    for row_number, value in enumerate(column(rows, name, path), 1):
        try:
            number = TRUTH_VALUES.get(value.lower(), value) if isinstance(value, str) else value
            numbers.append(float(number))
        except (TypeError, ValueError, OverflowError):
            numbers.append(math.nan)
        if not 0 <= numbers[-1] <= 1:
            raise InvalidFileError(
                f"{path}: '{name}' of row {row_number} is {str(value)[:40]!r}, not a probability "
                f"in [0, 1]. Divide scores by their maximum, or remove the row."
            )
    return numbers


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


def _csv(file: IO[str], delimiter: str, path: Path) -> list[Row]:
    reader = csv.DictReader(file, delimiter=delimiter, strict=True)
    rows = []
    previous_limit = csv.field_size_limit(MAX_FIELD_LENGTH)
    try:
        for row in reader:
            if None in row:
                raise InvalidFileError(
                    f"{path}: line {reader.line_num} has more fields than the first line names. "
                    f"Put quotes around texts that hold a {delimiter!r}."
                )
            rows.append(row)
    finally:
        csv.field_size_limit(previous_limit)
    return rows


def _parquet(path: Path, columns: Sequence[str]) -> list[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise InvalidFileError(
            f"To read {path}, install pyarrow: pip install pyarrow. Or convert it to JSON Lines."
        ) from error
    try:
        file = pyarrow.parquet.ParquetFile(path)
        names = [name for name in file.schema_arrow.names if name in columns or not columns]
        if missing := [name for name in columns if name not in names]:
            raise InvalidFileError(
                f"{path} has no column {', '.join(missing)}; it has "
                f"{', '.join(file.schema_arrow.names)}. Name the columns to use."
            )
        rows: list[Row] = file.read(names).to_pylist()
    except InvalidFileError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise InvalidFileError(
            f"{path} is damaged, or not Parquet ({reason(error)}). Write it again."
        ) from error
    return rows
