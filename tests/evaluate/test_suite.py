"""Suites: those that come with foretrace, and those of others."""

import json
from pathlib import Path

import pytest

from foretrace.errors import ForetraceError, InvalidFileError, InvalidInputError
from foretrace.evaluate.suite import Table, load_suite, suite_names

OWN = """
prompts: {file: prompts.jsonl, text: prompt}
attributes:
  polite: {file: scored.jsonl, score: rudeness, invert: true, transform: [2, -1]}
methods:
  bare: {}
  steered: {goals: [{of: polite, strength: 2}], horizon: 0}
judges:
  rude: {figures: [mean], source: "my_judge:score"}
"""


@pytest.mark.parametrize("name", suite_names())
def test_every_suite_is_whole(name: str) -> None:
    suite = load_suite(name)
    assert suite.name == name
    assert "bare" in suite.methods
    assert suite.judges


def test_the_suites_that_are_promised() -> None:
    promised = {"detox", "detox-hard", "roles", "politics", "politics+detox", "sentiment"}
    assert promised <= set(suite_names())
    assert load_suite("detox-hard").methods == load_suite("detox").methods


def test_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(OWN)
    suite = load_suite(str(file))
    assert suite.name == "mine"
    assert suite.attributes["polite"].affine.scale == 2
    assert suite.methods["steered"].goals[0].strength == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (OWN.replace("strength", "strenght"), "Did you mean strength?"),
        (OWN.replace("  bare: {}\n", ""), "no method 'bare'"),
        (OWN.replace("[mean]", "[median]"), "asked for median"),
        (OWN.replace(', source: "my_judge:score"', ""), "exactly one of"),
        (OWN.replace("text: prompt}", "text: prompt, x: 1}"), "'x' is not known"),
        ("[1, 2]", "must be a mapping"),
        ("a: [", "not YAML"),
        (OWN.replace("[mean]", "mean"), "are lists"),
    ],
)
def test_what_is_wrong_is_told(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ForetraceError, match=expected.replace("?", r"\?")):
        load_suite(str(file))


def test_a_suite_cannot_extend_itself(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"extends: {file}\n")
    with pytest.raises(InvalidFileError, match="extends itself"):
        load_suite(str(file))


def test_names_that_do_not_exist(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="Did you mean detox-hard"):
        load_suite("detox-hart")
    with pytest.raises(InvalidFileError, match="no file"):
        load_suite(str(tmp_path / "none.yaml"))


def test_rows_are_chosen_by_what_they_hold(tmp_path: Path) -> None:
    rows = [
        {"text": f"t{n}" if n else " ", "role": f"r{n % 2}", "split": "test" if n % 3 else "train"}
        for n in range(20)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert len(Table("rows.jsonl").rows(tmp_path)) == 19  # the blank one is left out
    chosen = Table("rows.jsonl", where={"split": "test"}, at_most={"by": "role", "rows": 2})
    assert [row["text"] for row in chosen.rows(tmp_path)] == ["t1", "t2", "t4", "t5"]
    parts = [
        {row["text"] for row in Table("rows.jsonl", share=share).rows(tmp_path)}
        for share in ({"by": "text", "of": 2, "take": take} for take in (0, 1))
    ]
    assert len(parts[0] | parts[1]) == 19
    assert not parts[0] & parts[1]
    with pytest.raises(InvalidFileError, match="has no 'body'"):
        Table("rows.jsonl", "body").rows(tmp_path)
