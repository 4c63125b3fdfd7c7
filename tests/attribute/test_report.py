"""Reports of attributes: their verdicts and their records."""

import json
from dataclasses import replace

import pytest

from foretrace.attribute import Attribute, AttributeConfig
from foretrace.attribute.report import AttributeReport, LevelReport, TextPair
from foretrace.errors import InvalidInputError

PAIR = TextPair("The film", " was long", " was a delight")


def level(before: float, after: float, **changed: object) -> LevelReport:
    plain = LevelReport("strong", 3.0, 0.15, before, after, 0.03, 1.05, 0.02, 0.15, (PAIR,))
    return replace(plain, **changed)  # type: ignore[arg-type]


def report(
    *levels: LevelReport, independent: bool = True, auc: float | None = 0.9
) -> AttributeReport:
    return AttributeReport(levels, independent, auc, num_texts=1000, num_prompts=32)


@pytest.mark.parametrize(
    ("measured", "outcome", "expected"),
    [
        (level(0.52, 0.71), "weak", "0.52 to 0.71: weak. The gain of 0.19 is below 0.25"),
        (level(0.40, 0.70), "works", "The gain of 0.30 is at least 0.25."),
        (
            level(0.10, 0.36),
            "weak",
            "0.36 is below 0.5: most texts still lack it. Bare texts rarely",
        ),
        (level(0.10, 0.20), "weak", "The gain of 0.10 is below 0.25, and below half"),
        (level(0.90, 0.97), "works", "at least half of what bare texts lack."),
        (level(0.50, 0.55), "does not work", "The gain of 0.05 is not above 0.06"),
        (level(0.50, 0.80, standard_error=0.16), "does not work", "not above 0.32"),
        (level(0.50, 0.40), "does not work", "The gain of -0.10"),
        (level(0.97, 0.97), "does not work", "Bare texts have the attribute already: 0.97."),
        (level(0.4, 0.7, perplexity_ratio=1.31), "works", "Perplexity rises by 31%, more than 25%"),
        (level(0.4, 0.7, perplexity_ratio=0.8), "works", "falls to 80% of bare texts, below 90%"),
        (level(0.4, 0.7, perplexity_ratio=1.31, perplexity_error=0.2), "works", "at least 0.25."),
        (level(0.4, 0.7, perplexity_ratio=0.8, perplexity_error=0.2), "works", "at least 0.25."),
        (level(0.4, 0.7, price=0.05), "works", "The price is 0.050 nats per token instead of 0.15"),
        (level(0.4, 0.7, price=0.18), "works", "at least 0.25."),
    ],
)
def test_the_verdict_names_the_number_that_decides(
    measured: LevelReport, outcome: str, expected: str
) -> None:
    verdict = report(measured).verdict
    assert measured.outcome == report(measured).outcome == outcome
    assert f": {outcome}." in verdict
    assert expected in verdict
    assert ("Perplexity" in verdict) is not measured.is_fluent


def test_the_verdict_proposes_the_strongest_fluent_level() -> None:
    mild, medium = (level(0.4, 0.6, level=name) for name in ("mild", "medium"))
    verdict = report(mild, medium, level(0.4, 0.8, perplexity_ratio=1.6)).verdict
    assert "Use `medium`." in verdict
    assert "Use" not in report(level(0.4, 0.8, perplexity_ratio=1.6)).verdict


@pytest.mark.parametrize(
    ("independent", "auc", "expected"),
    [
        (True, 0.9, "an independent classifier of whole texts (AUC 0.90 on 1,000 texts)"),
        (False, None, "its own classifier, which may overstate"),
        (False, 0.58, "AUC of only 0.58 on these 1,000 texts"),
    ],
)
def test_the_judge_is_named(independent: bool, auc: float | None, expected: str) -> None:
    measured = report(level(0.4, 0.7), independent=independent, auc=auc)
    assert expected in measured.judge
    assert ("may overstate" in measured.verdict) is not independent


def test_the_record_of_the_fit_keeps_the_report() -> None:
    measured = replace(report(level(0.4, 0.7)), warnings=("few texts",))
    fit = json.loads(json.dumps({"report": measured.to_record(), "warnings": ["few texts"]}))
    attribute = Attribute.from_rewards([0.0, 1.0])
    assert attribute.report is None
    stored = replace(attribute, config=AttributeConfig(fit=fit))
    assert stored.report == measured
    assert fit["report"]["verdict"] == measured.verdict
    assert (~stored).report is None


EMPTY = {
    "levels": [],
    "independent": True,
    "judge_auc": 0.9,
    "num_texts": 9,
    "num_prompts": 9,
}


@pytest.mark.parametrize("record", [None, {}, {"levels": [{}]}, {"levels": []}, EMPTY])
def test_a_damaged_record_is_refused(record: object) -> None:
    attribute = Attribute.from_rewards([0.0, 1.0])
    damaged = replace(attribute, config=AttributeConfig(fit={"report": record}))
    with pytest.raises(InvalidInputError, match="foretrace calibrate"):
        _ = damaged.report
