"""Pairs for a blind reader do not show which text is steered, and answers are scored fairly."""

import json
import sys
from pathlib import Path

import pytest

from page_runner import PROJECT

sys.path.insert(0, str(PROJECT / "benchmarks"))

from blind_pairs import Reading, main, write_pairs

PAIRS = [(f"prompt {number}", f"bare {number}", f"steered {number}") for number in range(40)]


def test_the_key_says_which_text_is_steered(tmp_path: Path) -> None:
    write_pairs(PAIRS, tmp_path, seed=0)
    pairs, key = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("pairs", "key"))
    letters = [row["steered"] for row in key]
    assert [pair[letter] for pair, letter in zip(pairs, letters, strict=True)] == [
        steered for _, _, steered in PAIRS
    ]
    assert 10 < letters.count("a") < 30
    assert set(pairs[0]) == {"prompt", "a", "b"}


def test_answers_are_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_pairs(PAIRS, tmp_path, seed=0)
    letters = [row["steered"] for row in json.loads((tmp_path / "key.json").read_text())]
    other = {"a": "b", "b": "a"}
    answers = [*letters[:28], "tie", "tie", *(other[letter] for letter in letters[30:])]
    (tmp_path / "answers.json").write_text(json.dumps(answers))
    arguments = ["blind_pairs.py", "score", str(tmp_path), str(tmp_path / "answers.json")]
    monkeypatch.setattr(sys, "argv", arguments)
    main()
    assert capsys.readouterr().out.startswith("steered 28, bare 10, ties 2: 72% [56%, 85%]")


def test_the_interval_is_that_of_clopper_and_pearson() -> None:
    """The bounds of 0 of n are known in closed form, and those of n of n are their mirror image."""
    low, high = Reading(0, 40, 0).interval()
    assert low == 0.0
    assert high == pytest.approx(1 - 0.025 ** (1 / 40))
    mirrored = Reading(40, 0, 0).interval()
    assert mirrored[0] == pytest.approx(1 - high)
    assert mirrored[1] == 1.0


def test_every_pair_needs_an_answer() -> None:
    with pytest.raises(SystemExit, match="1 answers for 2 pairs"):
        Reading.of(["a"], ["a", "b"])
    with pytest.raises(SystemExit, match="Give one of a, b, tie"):
        Reading.of(["A"], ["a"])
