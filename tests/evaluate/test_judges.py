"""Test judges: batches, the cache of scores, and failures."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from foretrace.errors import InvalidFileError, InvalidInputError
from foretrace.evaluate import Judge, judge_texts, load_judge
from tiny_classifier import write_tiny_classifier


class RecordingScorer:
    """Scores texts by length, records the batches, and fails on some texts."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []

    def __call__(self, texts: list[str]) -> Sequence[float | None]:
        self.batches.append(texts)
        if "raise" in texts:
            raise RuntimeError("the service is down\nand more")
        answers = {"none": None, "nan": float("nan"), "much": 3.0}
        return [answers.get(text, len(text) / 10) for text in texts]


def test_texts_are_judged_in_batches_and_equal_texts_once() -> None:
    scorer, progress = RecordingScorer(), []
    judgements = judge_texts(
        ["a", "bb", "a", "ccc"],
        Judge("j", scorer),
        batch_size=2,
        on_progress=lambda *counts: progress.append(counts),
    )
    assert judgements.scores == [0.1, 0.2, 0.1, 0.3]
    assert scorer.batches == [["a", "bb"], ["ccc"]]
    assert progress == [(2, 3), (3, 3)]
    assert judgements.failed == 0


def test_cached_texts_are_not_judged_again(tmp_path: Path) -> None:
    cache, scorer = tmp_path / "deep" / "cache.jsonl", RecordingScorer()
    judge_texts(["a", "bb"], Judge("j", scorer), cache=cache)
    with cache.open("a") as file:
        file.write('{"key": "cut sho')  # as if the process was killed while writing
    judgements = judge_texts(["a", "bb", "ccc"], Judge("j", scorer), cache=cache)
    assert judgements.scores == [0.1, 0.2, 0.3]
    assert scorer.batches == [["a", "bb"], ["ccc"]]
    judge_texts(["a"], Judge("another", scorer), cache=cache)
    assert scorer.batches[-1] == ["a"]


@pytest.mark.parametrize("bad", ["raise", "none", "nan", "much"])
def test_a_failure_gives_none_and_leaves_other_texts_alone(tmp_path: Path, bad: str) -> None:
    cache, judge = tmp_path / "cache.jsonl", Judge("j", RecordingScorer())
    judgements = judge_texts(["a", bad, "bb"], judge, cache=cache)
    assert judgements.scores == [0.1, None, 0.2]
    assert judgements.failed == 1
    assert len(cache.read_text().splitlines()) == 2  # a failure is not cached
    if bad == "raise":
        assert judgements.last_failure == "the service is down"


def test_an_invalid_score_does_not_repeat_the_batch() -> None:
    scorer = RecordingScorer()
    judge_texts(["a", "much", "bb"], Judge("j", scorer))
    assert len(scorer.batches) == 1


def test_judging_stops_after_five_failed_batches(tmp_path: Path) -> None:
    calls = []

    def down(texts: list[str]) -> list[float]:
        calls.append(texts)
        raise ConnectionError("no answer")

    with pytest.raises(InvalidInputError, match=r"none of the last 5 batches \(no answer\)"):
        judge_texts([f"{n}" for n in range(1000)], Judge("j", down), batch_size=2)
    assert len(calls) == 15


@pytest.mark.parametrize("line", ['{"text": "a", "score": 0.5}', "5", '{"key": "k", "score": 7.0}'])
def test_a_cache_with_other_content_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "other.jsonl").write_text(line + "\n")
    with pytest.raises(InvalidFileError, match="not a file of judgements"):
        judge_texts(["a"], Judge("j", RecordingScorer()), cache=tmp_path / "other.jsonl")


def test_too_few_scores_are_failures() -> None:
    judgements = judge_texts(["a", "b"], Judge("j", lambda texts: []))
    assert judgements.scores == [None, None]


def test_a_python_function_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_judge.py").write_text("def score(texts):\n    return [0.25 for _ in texts]\n")
    monkeypatch.syspath_prepend(tmp_path)
    judge = load_judge("my_judge:score")
    assert judge_texts(["a"], judge).scores == [0.25]
    (tmp_path / "broken_judge.py").write_text("import os\nos.environ['NO SUCH KEY']\n")
    for source in ("my_judge:other", "no_such_module:score", "broken_judge:score"):
        with pytest.raises(InvalidInputError, match="cannot be imported"):
            load_judge(source)
    sys.modules.pop("my_judge")


def test_a_classifier_scores_the_probability_of_its_label(tmp_path: Path) -> None:
    folder = write_tiny_classifier(tmp_path / "judge", ("fine", "toxic"))
    toxic, fine = (load_judge(str(folder), label=label) for label in ("toxic", "fine"))
    texts = ["w1 w2", "w3", "w4 w5 w6 " * 100]  # the last exceeds the model's maximal length
    pairs = zip(judge_texts(texts, toxic).scores, judge_texts(texts, fine).scores, strict=True)
    for toxic_score, fine_score in pairs:
        assert toxic_score is not None
        assert fine_score is not None
        assert toxic_score + fine_score == pytest.approx(1.0)
    with pytest.raises(InvalidInputError, match="no class 'rude'; it has fine, toxic"):
        load_judge(str(folder), label="rude")
    with pytest.raises(InvalidInputError, match="needs a label"):
        load_judge(str(folder))


def test_a_zero_shot_classifier_takes_any_label(tmp_path: Path) -> None:
    folder = write_tiny_classifier(tmp_path / "nli", ("contradiction", "entailment"))
    judge = load_judge(str(folder), label="politics", zero_shot=True)
    judgements = judge_texts(["w1 w2", "w3"], judge)
    assert all(score is not None and 0 < score < 1 for score in judgements.scores)
    other = write_tiny_classifier(tmp_path / "other", ("fine", "toxic"))
    with pytest.raises(InvalidInputError, match="needs a class 'entailment'"):
        load_judge(str(other), label="politics", zero_shot=True)


def test_a_missing_judge_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the extra `transformers`")
    with pytest.raises(InvalidInputError, match="cannot be loaded"):
        load_judge(str(tmp_path), label="toxic")
