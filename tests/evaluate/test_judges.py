"""Judges: batched, remembered, and never a score where there was none."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from foretrace.errors import InvalidFileError, InvalidInputError
from foretrace.evaluate import Judge, judge_texts, load_judge
from tiny_classifier import write_tiny_classifier


class Counting:
    """A judge by length that keeps the batches it was given, and fails on some texts."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []

    def __call__(self, texts: list[str]) -> Sequence[float | None]:
        self.batches.append(texts)
        if "raise" in texts:
            raise RuntimeError("the service is down\nand more")
        answers = {"none": None, "nan": float("nan"), "much": 3.0}
        return [answers.get(text, len(text) / 10) for text in texts]


def test_texts_are_judged_in_batches_and_once_each() -> None:
    count, told = Counting(), []
    found = judge_texts(
        ["a", "bb", "a", "ccc"],
        Judge("j", count),
        batch_size=2,
        observe=lambda *progress: told.append(progress),
    )
    assert found.scores == [0.1, 0.2, 0.1, 0.3]
    assert count.batches == [["a", "bb"], ["ccc"]]
    assert told == [(2, 3), (3, 3)]
    assert found.failed == 0


def test_what_is_remembered_is_not_judged_again(tmp_path: Path) -> None:
    cache, count = tmp_path / "deep" / "cache.jsonl", Counting()
    judge_texts(["a", "bb"], Judge("j", count), cache=cache)
    with cache.open("a") as file:
        file.write('{"key": "cut sho')  # killed while it wrote
    found = judge_texts(["a", "bb", "ccc"], Judge("j", count), cache=cache)
    assert found.scores == [0.1, 0.2, 0.3]
    assert count.batches == [["a", "bb"], ["ccc"]]
    judge_texts(["a"], Judge("another", count), cache=cache)
    assert count.batches[-1] == ["a"]


@pytest.mark.parametrize("bad", ["raise", "none", "nan", "much"])
def test_a_failure_is_no_score_and_does_not_fail_others(tmp_path: Path, bad: str) -> None:
    cache, judge = tmp_path / "cache.jsonl", Judge("j", Counting())
    found = judge_texts(["a", bad, "bb"], judge, cache=cache)
    assert found.scores == [0.1, None, 0.2]
    assert found.failed == 1
    assert len(cache.read_text().splitlines()) == 2  # it may succeed another time
    if bad == "raise":
        assert found.last_failure == "the service is down"


def test_good_scores_beside_bad_ones_are_kept() -> None:
    count = Counting()
    judge_texts(["a", "much", "bb"], Judge("j", count))
    assert len(count.batches) == 1


def test_a_judge_that_is_down_is_not_asked_a_million_times(tmp_path: Path) -> None:
    calls = []

    def down(texts: list[str]) -> list[float]:
        calls.append(texts)
        raise ConnectionError("no answer")

    with pytest.raises(InvalidInputError, match=r"none of the last 5 batches \(no answer\)"):
        judge_texts([f"{n}" for n in range(1000)], Judge("j", down), batch_size=2)
    assert len(calls) == 15


@pytest.mark.parametrize("line", ['{"text": "a", "score": 0.5}', "5", '{"key": "k", "score": 7.0}'])
def test_another_file_is_not_taken_for_judgements(tmp_path: Path, line: str) -> None:
    (tmp_path / "other.jsonl").write_text(line + "\n")
    with pytest.raises(InvalidFileError, match="not a file of judgements"):
        judge_texts(["a"], Judge("j", Counting()), cache=tmp_path / "other.jsonl")


def test_too_few_scores_are_none() -> None:
    found = judge_texts(["a", "b"], Judge("j", lambda texts: []))
    assert found.scores == [None, None]


def test_a_function_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_judge.py").write_text("def score(texts):\n    return [0.25 for _ in texts]\n")
    monkeypatch.syspath_prepend(tmp_path)
    judge = load_judge("my_judge:score")
    assert judge_texts(["a"], judge).scores == [0.25]
    (tmp_path / "broken_judge.py").write_text("import os\nos.environ['NO SUCH KEY']\n")
    for wrong in ("my_judge:other", "no_such_module:score", "broken_judge:score"):
        with pytest.raises(InvalidInputError, match="cannot be imported"):
            load_judge(wrong)
    sys.modules.pop("my_judge")


def test_a_classifier_gives_the_probability_of_its_label(tmp_path: Path) -> None:
    folder = write_tiny_classifier(tmp_path / "judge", ("fine", "toxic"))
    toxic, fine = (load_judge(str(folder), label=label) for label in ("toxic", "fine"))
    texts = ["w1 w2", "w3", "w4 w5 w6 " * 100]  # the last is longer than the model can read
    pairs = zip(judge_texts(texts, toxic).scores, judge_texts(texts, fine).scores, strict=True)
    for one, other in pairs:
        assert one is not None
        assert other is not None
        assert one + other == pytest.approx(1.0)
    with pytest.raises(InvalidInputError, match="no class 'rude'; it has fine, toxic"):
        load_judge(str(folder), label="rude")
    with pytest.raises(InvalidInputError, match="needs a label"):
        load_judge(str(folder))


def test_a_model_of_entailment_takes_any_words(tmp_path: Path) -> None:
    folder = write_tiny_classifier(tmp_path / "nli", ("contradiction", "entailment"))
    judge = load_judge(str(folder), label="politics", zero_shot=True)
    found = judge_texts(["w1 w2", "w3"], judge)
    assert all(score is not None and 0 < score < 1 for score in found.scores)
    other = write_tiny_classifier(tmp_path / "other", ("fine", "toxic"))
    with pytest.raises(InvalidInputError, match="must know entailment"):
        load_judge(str(other), label="politics", zero_shot=True)


def test_a_judge_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="cannot be loaded"):
        load_judge(str(tmp_path), label="toxic")
