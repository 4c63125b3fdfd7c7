"""Required words are found as whole words, and the concepts of the benchmark are well formed."""

import json
from math import exp
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers", reason="needs the extra `transformers`")
pytest.importorskip("sklearn", reason="needs the extra `evaluate`")

from foretrace.evaluate.metrics import Measurement
from keyword_methods import Pair, words_grammar
from keyword_texts import (
    CONCEPTS,
    Places,
    TextFile,
    Written,
    keep_texts,
    missing_words,
    places,
    restore_texts,
)
from keywords import by_concept, compare_losses


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("The dog saw a park.", []),
        ("PARK! My Dog", []),
        ("dogs in the park", ["dog"]),
        ("a hotdog, and parking", ["dog", "park"]),
        ("dog_park", ["dog", "park"]),
        ("", ["dog", "park"]),
    ],
)
def test_words_count_as_whole_words_in_any_case(text: str, missing: list[str]) -> None:
    assert missing_words(text, ["dog", "park"]) == missing


def test_places_are_those_of_the_first_occurrences() -> None:
    text = " a dog sees the park. The dog runs"
    assert places(text, ["park", "dog"]) == Places(first=1, last=4, after=4)
    assert places(text, ["park", "dog", "cat"]) is None


def test_concepts_are_well_formed() -> None:
    data = json.loads(CONCEPTS.read_text(encoding="utf-8"))
    assert len(set(data["openings"])) == 20
    for size, concepts in data["concepts"].items():
        assert len({tuple(sorted(words)) for words in concepts}) == 20
        for words in concepts:
            assert len(set(words)) == int(size)
            assert all(word.isalpha() and word.islower() for word in words)


def test_no_opening_has_a_required_word() -> None:
    data = json.loads(CONCEPTS.read_text(encoding="utf-8"))
    words = [word for size in data["concepts"].values() for concept in size for word in concept]
    for opening in data["openings"]:
        assert missing_words(opening, words) == words


def test_the_grammar_has_rules_for_every_set_of_missing_words() -> None:
    grammar = words_grammar(["dog", "cat"])
    names = [line.split(" ::= ")[0] for line in grammar.splitlines()]
    assert len(names) == len(set(names))
    assert "text_0_1 ::= other text_0_1 | letters other text_0_1 | " in grammar
    assert "[Dd] [Oo] [Gg] after_1" in grammar
    assert grammar.count("root ::= text_0_1") == 1


def test_kept_texts_are_restored_into_an_empty_folder(tmp_path: Path) -> None:
    texts = [Written(1, 0, " a café", [0.5, 1.25]), Written(3, 1, "", [])]
    for name in ("bare", "lookahead, positive"):
        TextFile(tmp_path / "results" / f"{name}.jsonl").add(texts)
    keep_texts(tmp_path / "results", tmp_path / "kept.xz")
    restore_texts(tmp_path / "kept.xz", tmp_path / "again")
    for name in ("bare", "lookahead, positive"):
        assert TextFile(tmp_path / "again" / f"{name}.jsonl").read() == texts
    restore_texts(tmp_path / "kept.xz", tmp_path / "again")  # it has texts
    assert TextFile(tmp_path / "again" / "bare.jsonl").read() == texts


def test_intervals_resample_concepts() -> None:
    pairs = [Pair(("dog",), "a"), Pair(("cat",), "b"), Pair(("dog",), "c")]
    summed = by_concept(Measurement(np.array([1.0, 2.0, 4.0]), np.array([1.0, 1.0, 0.0])), pairs)
    assert summed.totals.tolist() == [5.0, 2.0]
    assert summed.counts.tolist() == [1.0, 1.0]


def test_losses_are_compared_where_both_are_known() -> None:
    pairs = [Pair((word,), "a") for word in ("dog", "cat", "park")]
    percent = compare_losses([1.0, 2.0, 9.0], [2.0, 4.0, None], pairs).value
    assert percent == pytest.approx(100 * (exp(-1.5) - 1))
