"""Required words in texts: which are there, and where; and texts kept as JSON lines."""

import json
import lzma
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from foretrace import _io

CONCEPTS = Path(__file__).parent / "keywords.json"
KEPT = Path(__file__).parent.parent / "docs" / "results" / "generations" / "keywords.jsonl.xz"


class Places(NamedTuple):
    """Where required words are in a text, in words that are separated by white space."""

    first: int
    """The words before the first required word."""
    last: int
    """The words before the required word that comes last."""
    after: int
    """The words after that one."""


class Written(NamedTuple):
    """A text of a pair, as it is kept."""

    size: int
    pair: int
    text: str
    nats: list[float]
    """The negative log-probability of each token under the bare LM, without the end."""


def find_word(text: str, word: str) -> re.Match[str] | None:
    """Return where a text has a word as a whole word, in any case."""
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE)


def missing_words(text: str, words: Iterable[str]) -> list[str]:
    """Return the words that a text does not have as whole words, in any case."""
    return [word for word in words if find_word(text, word) is None]


def places(text: str, words: Sequence[str]) -> Places | None:
    """Return where the words are; None if one is missing. The first occurrence of each counts."""
    found = [find_word(text, word) for word in words]
    matches = [one for one in found if one is not None]
    if len(matches) < len(words):
        return None
    begins = sorted((len(text[: one.start()].split()), one.end()) for one in matches)
    return Places(begins[0][0], begins[-1][0], len(text[begins[-1][1] :].split()))


class TextFile:
    """Texts of one method in a file of JSON lines. An interrupted run goes on from it."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def read(self) -> list[Written]:
        """Return all texts."""
        return [Written(**row) for row in read_lines(self.file)]

    def add(self, texts: Iterable[Written]) -> None:
        """Add texts of whole pairs."""
        add_lines(self.file, (text._asdict() for text in texts))


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file of JSON lines; none if there is no file."""
    if file.exists():
        with file.open(encoding="utf-8") as lines:
            yield from map(json.loads, lines)


def add_lines(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Add rows to a file of JSON lines at once."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as lines:
        lines.write("".join(json.dumps(row) + "\n" for row in rows))


def keep_texts(folder: Path, kept: Path) -> None:
    """Write the texts of all methods in a folder to one compressed file."""
    content = "".join(
        json.dumps({"method": file.stem, **row}) + "\n"
        for file in sorted(folder.glob("*.jsonl"))
        for row in read_lines(file)
    )
    with _io.atomic_write(kept) as scratch:
        scratch.write_bytes(lzma.compress(content.encode(), preset=9))


def restore_texts(kept: Path, folder: Path) -> None:
    """Write the texts of such a file into a folder that has none."""
    if folder.exists() or not kept.exists():
        return
    by_method: dict[str, list[dict[str, Any]]] = {}
    for line in lzma.decompress(kept.read_bytes()).decode().splitlines():
        row = json.loads(line)
        by_method.setdefault(row.pop("method"), []).append(row)
    for method, rows in by_method.items():
        add_lines(folder / f"{method}.jsonl", rows)
