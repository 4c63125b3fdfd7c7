"""Tabular files are read in every format, and damaged ones raise InvalidFileError."""

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace import _tabular
from foretrace.attribute import Attribute, tokenize
from foretrace.errors import ForetraceError, InvalidFileError
from foretrace.evaluate import Judge, judge_texts
from tiny_lm import word_tokenizer

WORDS = word_tokenizer()
ROWS = [{"text": "one, two", "score": 0.5}, {"text": 'zwei "drei"\nvier', "score": 1.0}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
CSV = 'text,score\r\n"one, two",0.5\r\n"zwei ""drei""\nvier",1.0\r\n'
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".xz": lzma.compress,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
}


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize(("kind", "content"), [(".jsonl", LINES), (".csv", CSV)])
def test_every_format_gives_the_same_rows(
    tmp_path: Path, kind: str, content: str, suffix: str
) -> None:
    path = tmp_path / f"table.v2{kind}{suffix}"
    path.write_bytes(COMPRESS[suffix](content.encode()))
    rows = _tabular.read_rows(path)
    assert _tabular.texts(rows, "text", path) == [row["text"] for row in ROWS]
    assert _tabular.probabilities(rows, "score", path) == [0.5, 1.0]


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "table.parquet")
    path = tmp_path / "table.parquet"
    assert _tabular.read_rows(path) == ROWS
    assert _tabular.read_rows(path, ["text"]) == [{"text": row["text"]} for row in ROWS]
    with pytest.raises(InvalidFileError, match="no column body; it has text, score"):
        _tabular.read_rows(path, ["text", "body"])


def test_long_fields_in_csv(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("text,score\n" + "word " * 100_000 + ",1\n")
    assert len(_tabular.read_rows(path)[0]["text"]) == 500_000


def test_plain_text_lines(tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("one\n\ntwo \n")
    assert _tabular.read_rows(tmp_path / "lines.txt") == [{"text": "one"}, {"text": "two "}]


def test_true_and_false_are_1_and_0(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("text,score\na,True\nb,false\nc,1\n")
    assert _tabular.probabilities(_tabular.read_rows(path), "score", path) == [1.0, 0.0, 1.0]
    path = tmp_path / "table.jsonl"
    path.write_text('{"score": true}\n{"score": 0}\n')
    assert _tabular.probabilities(_tabular.read_rows(path), "score", path) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", b'{"text": "a", "score": 1}\n{"text"', "line 2 is not JSON"),
        ("a.jsonl", b"[1]\n", "holds list, not an object"),
        ("a.jsonl", b"", "no rows"),
        ("a.jsonl", b'{"text": "a"}\n', "no 'score'; it has text"),
        ("a.jsonl", b'{"text": "a", "score": null}\n', "no 'score'"),
        ("a.jsonl", b'{"text": "a", "score": "high"}\n', "'high', not a probability"),
        ("a.jsonl", b'{"text": "a", "score": [1]}\n', "not a probability"),
        ("a.jsonl", b'{"text": "a", "score": 1.5}\n', "row 1 is '1.5', not a probability"),
        ("a.jsonl", b'{"text": "a", "score": NaN}\n', "not a probability"),
        ("a.jsonl", b'{"text": "a \\ud800", "score": 1}\n', "row 1 holds half of a character"),
        ("a.jsonl", b'{"text": 1, "score": 1}\n', "int, not text"),
        ("a.jsonl", b'{"text": "\xff", "score": 1}\n', "UTF-8"),
        ("a.jsonl", b"[" * 100_000, "not JSON"),
        ("a.jsonl.xz", b"no xz", "cannot be read"),
        ("a.jsonl.gz", gzip.compress(LINES.encode(), mtime=0)[:-9], "cannot be read"),
        ("a.csv", b"text,score\na,1,2\n", "more fields"),
        ("a.csv", b"text,score\na\n", "no 'score'"),
        ("a.csv", b'text,score\n"a,1\n', "cannot be read"),
        ("a.parquet", b"PAR1 no PAR1", "not Parquet"),
        ("a.xlsx", b"", "must end in"),
        ("a", b"", "must end in"),
    ],
)
def test_damaged_tables_are_refused(
    tmp_path: Path, name: str, content: bytes, expected: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InvalidFileError, match=expected):
        read(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidFileError, match="no file"):
        _tabular.read_rows(tmp_path / "none.csv")


def read(path: Path) -> tuple[list[str], list[float]]:
    rows = _tabular.read_rows(path)
    return _tabular.texts(rows, "text", path), _tabular.probabilities(rows, "score", path)


arbitrary_bytes = st.binary(max_size=80) | st.text(max_size=40).map(
    lambda text: text.encode("utf-8", "replace")
)
fittable = "".join(f'{{"text": "w{n % 7} w1", "score": {n % 2}}}\n' for n in range(40))
damaged = st.builds(
    lambda content, position, other: content[:position] + other + content[position:],
    st.sampled_from([LINES.encode(), CSV.encode(), fittable.encode()]),
    st.integers(0, 1500),
    arbitrary_bytes | st.sampled_from([b"\\ud800", b"\\u0000", b"1e999", b"-", b"\x00", b"null"]),
)


@given(
    st.sampled_from([".jsonl", ".csv", ".tsv", ".txt", ".parquet", ".json"]),
    st.sampled_from(list(COMPRESS)),
    arbitrary_bytes | damaged,
    st.booleans(),
)
def test_any_content_is_read_or_raises_foretrace_errors(
    kind: str, suffix: str, content: bytes, compressed: bool
) -> None:
    """Read, fit and judge: no content raises anything but ForetraceError."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"table{kind}{suffix}"
        path.write_bytes(COMPRESS[suffix](content) if compressed else content)
        with suppress(ForetraceError):
            texts, scores = read(path)
            windows = tokenize(texts, WORDS)
            Attribute.fit(windows.token_ids, scores, vocab_size=100)
            judge_texts(texts, Judge("length", lambda texts: [0.5] * len(texts)))
