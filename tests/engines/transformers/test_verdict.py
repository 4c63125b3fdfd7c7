"""Calibration and report in one call."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `transformers`")

from transformers import PreTrainedModel

from foretrace.attribute import Attribute
from foretrace.engines.transformers.judged_runs import fit_judge
from foretrace.engines.transformers.verdict import calibrate_and_report, measure_report
from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM
from foretrace.lookahead.levels import BUDGETS
from parity_texts import EVEN, scored_texts
from tiny_lm import WORDS, tiny_hmm, word_tokenizer

TOKENIZER = word_tokenizer()


@pytest.fixture(scope="module")
def hmm() -> HMM:
    return tiny_hmm(TOKENIZER)


@pytest.fixture(scope="module")
def even() -> Attribute:
    return Attribute.from_rewards(torch.tensor(EVEN) - 0.5, first_only=False, name="even")


def test_levels_and_report_by_an_independent_judge(
    model: PreTrainedModel, hmm: HMM, even: Attribute, caplog: pytest.LogCaptureFixture
) -> None:
    texts, scores = scored_texts(meaningful=True)
    budgets = {**BUDGETS, "strong": 0.4}
    seen: set[tuple[str, str]] = set()

    def on_progress(stage: str, done: int, total: int, unit: str) -> None:
        seen.add((stage, unit))

    measured = calibrate_and_report(
        model,
        TOKENIZER,
        hmm,
        even,
        judge=fit_judge(model, TOKENIZER, texts, scores, on_progress),
        budgets=budgets,
        max_new_tokens=16,
        source={"model": "tiny"},
        on_progress=on_progress,
    )
    calibration = measured.config.fit["calibration"]
    assert calibration["model"] == "tiny"
    negated = calibration["negation_levels"]
    assert (~measured).config.levels == {key: level["strength"] for key, level in negated.items()}
    missed = [
        level
        for level in negated.values()
        if level["price"] != pytest.approx(level["budget"], rel=0.25)
    ]
    assert len(missed) <= 1
    assert len(caplog.messages) == len(missed)
    assert all("'~even' at 'strong' costs" in message for message in caplog.messages)
    report = measured.report
    assert report is not None
    assert report.independent
    assert report.judge_auc is not None
    assert report.judge_auc > 0.9
    assert (report.num_texts, report.num_prompts) == (200, 32)
    assert [level.level for level in report.levels] == list(BUDGETS)
    assert {level.level: level.strength for level in report.levels} == measured.config.levels
    for level in report.levels:
        assert level.budget == budgets[level.level]
        assert level.price == pytest.approx(level.budget, rel=0.4)
        assert len({pair.prompt for pair in level.pairs}) == 3
    gains = [level.gain for level in report.levels]
    assert gains == sorted(gains)
    assert report.outcome != "does not work"
    assert {("bare", "tokens"), ("judge", "texts")} <= seen


@pytest.mark.parametrize("meaningful", [True, False])
def test_without_a_judge_the_attribute_judges_itself(
    model: PreTrainedModel, hmm: HMM, even: Attribute, meaningful: bool
) -> None:
    judge = None if meaningful else fit_judge(model, TOKENIZER, *scored_texts(meaningful))
    measured = calibrate_and_report(model, TOKENIZER, hmm, even, judge=judge, max_new_tokens=8)
    report = measured.report
    assert report is not None
    assert not report.independent
    assert (report.judge_auc is None) is meaningful
    assert "may overstate" in report.verdict


def test_prompts_of_the_user(model: PreTrainedModel, hmm: HMM, even: Attribute) -> None:
    calibrated = replace(even, config=replace(even.config, levels={"medium": 0.5}))
    prompts = ["w1 w2", "w3"]
    first, second = (
        measure_report(model, TOKENIZER, hmm, calibrated, prompts, max_new_tokens=6)
        for _ in range(2)
    )
    assert first == second
    assert [pair.prompt for pair in first.levels[0].pairs] == prompts
    assert first.levels[0].budget is None


def test_rewards_without_effect_do_not_work(model: PreTrainedModel, hmm: HMM) -> None:
    """The weakest steering changes no text; the same random numbers make the same texts."""
    rewards = torch.zeros(len(WORDS))
    rewards[7] = 1e-6
    idle = Attribute.from_rewards(rewards, name="idle")
    calibrated = replace(idle, config=replace(idle.config, levels={"mild": 1.0}))
    report = measure_report(model, TOKENIZER, hmm, calibrated, max_new_tokens=6)
    (level,) = report.levels
    assert level.before == pytest.approx(level.after, abs=1e-6)
    assert level.perplexity_ratio == pytest.approx(1.0)
    assert all(pair.bare == pair.steered for pair in level.pairs)
    assert report.outcome == "does not work"


def test_levels_are_needed(model: PreTrainedModel, hmm: HMM, even: Attribute) -> None:
    with pytest.raises(InvalidInputError, match="has no levels"):
        measure_report(model, TOKENIZER, hmm, even)
