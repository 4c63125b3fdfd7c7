"""Test the held-out split: near duplicates are found, and held out together."""

from itertools import combinations, pairwise

import numpy as np
import pytest

from foretrace.attribute import Attribute
from foretrace.attribute.fitting.duplicates import MIN_SIMILARITY, near_duplicates
from foretrace.attribute.fitting.examples import Examples
from foretrace.attribute.fitting.split import MAX_CLUSTER, Split

VOCAB = 1000
Texts = list[list[int]]


def random_texts(count: int, length: int = 20, seed: int = 0) -> Texts:
    texts: Texts = np.random.default_rng(seed).integers(0, VOCAB, (count, length)).tolist()
    return texts


def with_copies(texts: Texts, copies: int, changed: int) -> Texts:
    """Return each text `copies` times, each time with other tokens in `changed` places."""
    random = np.random.default_rng(1)
    made = np.repeat(np.array(texts), copies, axis=0)
    places = random.permuted(np.tile(np.arange(made.shape[1]), (len(made), 1)), axis=1)
    np.put_along_axis(made, places[:, :changed], random.integers(0, VOCAB, (len(made), changed)), 1)
    copied: Texts = made.tolist()
    return copied


def examples_of(texts: Texts, groups: list[int] | None = None) -> Examples:
    scores = [float(number % 2) for number in range(len(texts))]
    return Examples.from_scores(texts, scores, VOCAB, groups)


def similarity(one: list[int], other: list[int]) -> float:
    sets = [set(pairwise(text)) or {(text[0], -1)} for text in (one, other)]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


@pytest.mark.parametrize("length", [1, 2, 3, 5, 20])
def test_pairs_of_near_duplicates_are_those_of_a_comparison_of_all_texts(length: int) -> None:
    """Copies of a text differ in a twentieth of their tokens; many short texts are equal."""
    texts = with_copies(random_texts(60, length), 3, length // 20)
    pairs = near_duplicates(examples_of(texts).shingles)
    found = {}
    for first, second, value in zip(*(part.tolist() for part in pairs), strict=True):
        found[first, second] = value
    expected = {}
    for first, second in combinations(range(len(texts)), 2):
        if (value := similarity(texts[first], texts[second])) >= MIN_SIMILARITY:
            expected[first, second] = value
    assert found.items() <= expected.items()
    assert {text for pair in found for text in pair} == {text for pair in expected for text in pair}


def test_texts_with_a_common_opening_are_no_near_duplicates() -> None:
    opening = list(range(6))
    texts = [opening + text for text in random_texts(500, 12)]
    assert len(near_duplicates(examples_of(texts).shingles).first) == 0


def test_near_duplicates_are_held_out_together() -> None:
    """Two windows of each text, and four copies of each."""
    texts = with_copies(random_texts(200), 4, 1)
    groups = [number // 2 for number in range(len(texts))]
    split = Split.of(examples_of(texts, groups), None, 0.1, 0)
    assert 38 <= split.held_out.num_groups <= 40
    assert split.leaked == 0
    assert split.near_duplicates == split.num_texts == 400
    scores = [float(number // 4 % 2) for number in range(len(texts))]
    record = Attribute.fit(texts, scores, vocab_size=VOCAB, groups=groups).config.fit
    assert (record["near_duplicates"], record["held_out_near_duplicates"]) == (400, 0)


def test_texts_without_near_duplicates_are_held_out_one_by_one() -> None:
    split = Split.of(examples_of(random_texts(400)), None, 0.1, 0)
    assert (len(split.fitting), len(split.held_out), split.near_duplicates) == (360, 40, 0)
    assert split.held_out.scores.sum() == 20


def test_many_texts_are_split() -> None:
    """The square of their number does not fit in 32 bits."""
    split = Split.of(examples_of(random_texts(50_000, 6)), None, 0.1, 0)
    assert (len(split.fitting), len(split.held_out)) == (45_000, 5_000)


@pytest.mark.parametrize("templates", [1, 2, 3])
def test_a_few_templates_are_split_instead_of_held_out_as_a_whole(templates: int) -> None:
    """Without a split of their clusters, the texts of a label would be all held out or none."""
    texts = with_copies(random_texts(templates), 400, 1)
    split = Split.of(examples_of(texts), None, 0.1, 0)
    assert 0.05 < len(split.held_out) / len(texts) < MAX_CLUSTER
    assert 0 < split.held_out.scores.mean() < 1
    assert split.leaked == len(split.held_out)


def test_one_large_template_is_fitted_to_and_others_are_held_out() -> None:
    texts = with_copies(random_texts(1), 90, 1) + random_texts(310, seed=2)
    split = Split.of(examples_of(texts), None, 0.1, 0)
    assert 38 <= len(split.held_out) <= 40
    assert (split.near_duplicates, split.leaked) == (90, 0)


def test_validation_texts_that_are_in_the_fit_are_counted() -> None:
    texts, others = random_texts(100), random_texts(50, seed=1)
    split = Split.of(examples_of(texts), examples_of(others + texts[:7]), 0.1, 0)
    assert (split.leaked, split.near_duplicates, split.held_out.num_groups) == (7, 14, 57)
