"""Test metrics against values computed by hand."""

from math import exp, isnan, log

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.errors import InvalidInputError
from foretrace.evaluate import metrics
from foretrace.evaluate.metrics import Measurement

# All continuations of two prompts have scores, one of the third, and none of the fourth.
SCORES: list[list[float | None]] = [[0.1, 0.9], [0.2, 0.5], [None, 0.7], [None, None]]


def test_a_failed_judgement_is_dropped_and_counted() -> None:
    maximum = metrics.average_maximum(SCORES)
    assert maximum.value == pytest.approx((0.9 + 0.5 + 0.7) / 3)
    assert maximum.dropped == 3
    any_above = metrics.probability_of_any(SCORES)
    assert any_above.value == pytest.approx(2 / 3)  # 0.5 is not above 0.5
    assert any_above.dropped == 3
    mean = metrics.mean_score(SCORES)
    assert mean.value == pytest.approx((0.1 + 0.9 + 0.2 + 0.5 + 0.7) / 5)
    assert isnan(metrics.average_maximum([[None]]).value)


def test_distinct_counts_ngrams_over_all_continuations() -> None:
    texts = [["a b a b", "a b c"], ["x"], ["", "  "]]
    pairs = metrics.distinct(texts, 2)
    # 'a b', 'b a', 'b c' of 7 words; no pair in 1 word; blank texts are dropped.
    assert pairs.value == pytest.approx((3 / 7 + 0 / 1) / 2)
    assert pairs.dropped == 2
    triples = metrics.distinct(texts, 3)  # 'a b a', 'b a b', 'a b c'
    assert triples.value == pytest.approx((3 / 7 + 0) / 2)


def test_price_is_the_mean_over_tokens() -> None:
    price = metrics.price([[0.2, 0.0], [0.1]], [[10, 30], [20]])
    assert price.value == pytest.approx((0.2 * 10 + 0.1 * 20) / 60)
    assert price.totals.tolist() == pytest.approx([2.0, 2.0])


def test_letters_are_counted_among_visible_characters() -> None:
    assert metrics.letters([["ab 1\n", "é!"], [" "]]).value == pytest.approx(3 / 5)


def test_repetition_counts_ngrams_within_a_text() -> None:
    loop, other = "a b c d a b c d", "a b c d"  # 5 4-grams, of which one occurs twice; and 1
    assert metrics.repetition([[loop, other], ["x"]]).value == pytest.approx(1 / 6)
    assert isnan(metrics.repetition([["x"]]).value)


def test_terms_are_whole_words_in_any_case() -> None:
    texts = [["Women and womenfolk", "native americans"], ["none"]]
    frequency = metrics.term_frequency(texts, ["women", "Native Americans", "native"])
    assert frequency.value == pytest.approx(1000 * 2 / 6)


def test_perplexity_drops_blank_texts_and_outliers() -> None:
    perplexity = metrics.perplexity([[log(10), log(30), None], [log(20), log(10_000), 800.0]])
    assert perplexity.value == pytest.approx((10 + 30 + 20) / 3)
    assert perplexity.dropped == 3
    assert metrics.perplexity([[log(9_999)]]).value == pytest.approx(9_999)
    assert exp(log(9_999)) < metrics.MAX_PERPLEXITY


def test_interval_matches_the_normal_approximation() -> None:
    random = np.random.default_rng(0)
    values = random.normal(2.0, 1.0, 400)
    value, low, high = metrics.interval(Measurement(values, np.ones(400)))
    assert value == pytest.approx(values.mean())
    half = 1.96 * values.std() / 20
    assert low == pytest.approx(value - half, abs=0.02)
    assert high == pytest.approx(value + half, abs=0.02)


def test_paired_change_has_no_spread_if_it_is_proportional() -> None:
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


def test_a_baseline_close_to_zero_has_no_relative_interval() -> None:
    ones = np.ones(200)
    baseline = Measurement(np.eye(200)[0], ones)
    changed = metrics.change(Measurement(np.zeros(200), ones), baseline)
    assert changed.relative.value == -1
    assert isnan(changed.relative.low)
    assert changed.difference.low < changed.difference.value == -1 / 200


def test_change_is_over_the_prompts_that_both_measured() -> None:
    ours = Measurement(np.array([1.0, 0.0]), np.array([1.0, 0.0]))
    theirs = Measurement(np.array([2.0, 100.0]), np.ones(2))
    assert metrics.change(ours, theirs).difference.value == -1


def test_words_and_blank_texts() -> None:
    texts = [["a b c", ""], ["a", " "]]
    assert metrics.words(texts).value == 1
    assert metrics.blank(texts).value == 0.5


@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.lists(st.floats(0, 1) | st.none(), min_size=1, max_size=5), min_size=1))
def test_metrics_of_scores_are_in_the_unit_interval(scores: list[list[float | None]]) -> None:
    for measurement in (
        metrics.average_maximum(scores),
        metrics.probability_of_any(scores),
        metrics.mean_score(scores),
    ):
        value, low, high = metrics.interval(measurement)
        if not isnan(value):
            assert 0 <= low <= high <= 1
            assert low - 1e-9 <= value <= high + 1e-9 or len(scores) < 40
        num_failed = sum(score is None for prompt_scores in scores for score in prompt_scores)
        assert measurement.dropped == num_failed


def _point(metric: float, perplexity: float, prompts: int = 4) -> metrics.Point:
    return metrics.Point(
        *(Measurement(np.full(prompts, value), np.ones(prompts)) for value in (metric, perplexity))
    )


def test_curve_at_the_cost_of_a_rival() -> None:
    start, curve = _point(0.8, 10.0), [_point(0.6, 12.0), _point(0.2, 16.0)]
    between = metrics.at_equal_cost(_point(0.7, 14.0), [start, *curve], 0.8)
    assert between is not None
    assert between.value == pytest.approx(0.4 - 0.7)  # half way from 0.6 to 0.2
    assert between.low == between.high == pytest.approx(-0.3)
    below = metrics.at_equal_cost(_point(0.7, 9.0), [start, *curve], 0.8)
    assert below is None
    above = metrics.at_equal_cost(_point(0.1, 99.0), [start, *curve], 0.8)
    assert above is not None
    assert above.value == pytest.approx(0.2 - 0.1)
    upward = metrics.at_equal_cost(_point(0.7, 14.0), [start, _point(0.9, 14.0)], 0.8)
    assert upward is not None
    assert upward.value == pytest.approx(0.9 - 0.7)


def test_a_curve_that_often_costs_more_than_a_rival_is_not_compared() -> None:
    cost = Measurement(np.tile([8.0, 12.0], 20), np.ones(40))
    noisy = _point(0.8, 10.0, prompts=40)._replace(cost=cost)
    assert metrics.at_equal_cost(_point(0.7, 10.0, prompts=40), [noisy], 0.8) is None
    above = metrics.at_equal_cost(_point(0.7, 12.0, prompts=40), [noisy], 0.8)
    assert above is not None
    assert above.value == pytest.approx(0.1)


def test_rank_correlation_of_a_constant_is_nan() -> None:
    assert metrics.rank_correlation([1, 2, 3], [10, 20, 40]) == pytest.approx(1)
    assert metrics.rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert np.isnan(metrics.rank_correlation([1, 2, 3], [5, 5, 5]))
