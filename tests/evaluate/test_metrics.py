"""Metrics: values computed by hand."""

from math import exp, isnan, log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.errors import InvalidInputError
from foretrace.evaluate import metrics
from foretrace.evaluate.metrics import Measurement

# Two prompts judged whole, one in part, one not at all.
SCORES: list[list[float | None]] = [[0.1, 0.9], [0.2, 0.5], [None, 0.7], [None, None]]


def test_a_failed_judgement_is_dropped_and_counted() -> None:
    worst = metrics.average_maximum(SCORES)
    assert worst.value == pytest.approx((0.9 + 0.5 + 0.7) / 3)
    assert worst.dropped == 3
    any_of_them = metrics.probability_of_any(SCORES)
    assert any_of_them.value == pytest.approx(2 / 3)  # 0.5 is not above 0.5
    assert any_of_them.dropped == 3
    mean = metrics.mean_score(SCORES)
    assert mean.value == pytest.approx((0.1 + 0.9 + 0.2 + 0.5 + 0.7) / 5)
    assert isnan(metrics.average_maximum([[None]]).value)


def test_distinct_counts_pairs_over_all_continuations() -> None:
    texts = [["a b a b", "a b c"], ["x"], ["", "  "]]
    two = metrics.distinct(texts, 2)
    # a b, b a, b c of 7 words; no pair of 1 word; nothing of blanks.
    assert two.value == pytest.approx((3 / 7 + 0 / 1) / 2)
    assert two.dropped == 2
    three = metrics.distinct(texts, 3)  # a b a, b a b, a b c
    assert three.value == pytest.approx((3 / 7 + 0) / 2)


def test_perplexity_drops_blanks_and_the_worst() -> None:
    found = metrics.perplexity([[log(10), log(30), None], [log(20), log(10_000), 800.0]])
    assert found.value == pytest.approx((10 + 30 + 20) / 3)
    assert found.dropped == 3
    assert metrics.perplexity([[log(9_999)]]).value == pytest.approx(9_999)
    assert exp(log(9_999)) < metrics.WORST_PERPLEXITY


def test_an_interval_is_that_of_resampled_prompts() -> None:
    random = np.random.default_rng(0)
    values = random.normal(2.0, 1.0, 400)
    value, low, high = metrics.interval(Measurement(values, np.ones(400)))
    assert value == pytest.approx(values.mean())
    half = 1.96 * values.std() / 20
    assert low == pytest.approx(value - half, abs=0.02)
    assert high == pytest.approx(value + half, abs=0.02)


def test_a_paired_difference_is_surer_than_two_intervals() -> None:
    random = np.random.default_rng(0)
    base = random.normal(2.0, 1.0, 200)
    ones = np.ones(200)
    change = metrics.change(Measurement(base / 2, ones), Measurement(base, ones))
    assert change.relative.value == pytest.approx(-0.5)
    assert change.relative.low == pytest.approx(-0.5)
    assert change.relative.high == pytest.approx(-0.5)
    assert change.difference.value == pytest.approx(-base.mean() / 2)
    with pytest.raises(InvalidInputError, match="same prompts"):
        metrics.change(Measurement(base, ones), Measurement(base[1:], ones[1:]))


def test_a_share_of_almost_nothing_has_no_relative_interval() -> None:
    ones = np.ones(200)
    almost = Measurement(np.eye(200)[0], ones)
    changed = metrics.change(Measurement(np.zeros(200), ones), almost)
    assert changed.relative.value == -1
    assert isnan(changed.relative.low)
    assert changed.difference.low < changed.difference.value == -1 / 200


def test_a_change_is_over_prompts_that_both_measured() -> None:
    ours = Measurement(np.array([1.0, 0.0]), np.array([1.0, 0.0]))
    theirs = Measurement(np.array([2.0, 100.0]), np.ones(2))
    assert metrics.change(ours, theirs).difference.value == -1


def test_short_and_blank_texts_are_seen() -> None:
    texts = [["a b c", ""], ["a", " "]]
    assert metrics.words(texts).value == 1
    assert metrics.blank(texts).value == 0.5


@given(st.lists(st.lists(st.floats(0, 1) | st.none(), min_size=1, max_size=5), min_size=1))
def test_figures_are_within_their_bounds(scores: list[list[float | None]]) -> None:
    for found in (
        metrics.average_maximum(scores),
        metrics.probability_of_any(scores),
        metrics.mean_score(scores),
    ):
        value, low, high = metrics.interval(found)
        if not isnan(value):
            assert 0 <= low <= high <= 1
            assert low - 1e-9 <= value <= high + 1e-9 or len(scores) < 40
        assert found.dropped == sum(score is None for own in scores for score in own)


def _point(figure: float, price: float, prompts: int = 4) -> metrics.Point:
    return metrics.Point(
        *(Measurement(np.full(prompts, value), np.ones(prompts)) for value in (figure, price))
    )


def test_a_curve_at_the_price_of_a_rival() -> None:
    start, curve = _point(0.8, 10.0), [_point(0.6, 12.0), _point(0.2, 16.0)]
    found = metrics.at_equal_price(_point(0.7, 14.0), [start, *curve], 0.8)
    assert found is not None
    assert found.value == pytest.approx(0.4 - 0.7)  # half way from 0.6 to 0.2
    assert found.low == found.high == pytest.approx(-0.3)
    cheaper = metrics.at_equal_price(_point(0.7, 9.0), [start, *curve], 0.8)
    assert cheaper is None
    dearer = metrics.at_equal_price(_point(0.1, 99.0), [start, *curve], 0.8)
    assert dearer is not None
    assert dearer.value == pytest.approx(0.2 - 0.1)
    upward = metrics.at_equal_price(_point(0.7, 14.0), [start, _point(0.9, 14.0)], 0.8)
    assert upward is not None
    assert upward.value == pytest.approx(0.9 - 0.7)


def test_rank_correlation_of_what_never_changes_is_not_a_number() -> None:
    assert metrics.rank_correlation([1, 2, 3], [10, 20, 40]) == pytest.approx(1)
    assert metrics.rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert np.isnan(metrics.rank_correlation([1, 2, 3], [5, 5, 5]))
