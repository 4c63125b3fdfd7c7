"""Judge the texts of a suite, and read how well its judges agree with reference scores."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from foretrace.attribute import Attribute
from foretrace.evaluate import metrics
from foretrace.evaluate.scoring import Scorer
from foretrace.evaluate.suite import Suite
from peers.comparisons import Agreement, Measured, agreement, measure
from peers.kept import KeptTexts

OWN = "foretrace's attribute"  # the name of its scores beside those of the judges


class Scored(NamedTuple):
    """The measurements of a suite, and what is known about its judges."""

    measured: Measured
    judges: Mapping[str, Mapping[str, Any]]
    """The agreement of every judge with reference scores."""
    agreement: Agreement
    """The agreement of both judges."""
    own: Measured | None
    """The same with the attribute in place of the judges, if the texts have its scores."""


def judge_texts(kept: KeptTexts, suite: Suite) -> KeptTexts:
    """Return texts with the scores of a suite's judges, and what is known about the judges.

    Scores are also kept beside the outputs of the suite, so that none is computed twice.
    """
    results = Path(os.environ["FORETRACE_RESULTS"])
    scores, judges = {}, {}
    for name, plan in suite.judges.items():
        scorer = Scorer(
            name,
            plan,
            Path(os.environ["FORETRACE_DATA"]),
            results / "peers" / kept.suite,
            results / "judges",
            os.environ.get("FORETRACE_ENCODER"),
            "cpu",
            [{}] * int(kept.header["prompts"]["count"]),
        )
        judges[name] = scorer.describe()
        scores[name] = {method: scorer.score(one.texts) for method, one in kept.methods.items()}
    return kept.judged(scores).record(judges=judges)


def score_by_attribute(kept: KeptTexts, attribute: Attribute, tokenizer: Any) -> KeptTexts:
    """Return texts with the probabilities of foretrace's own attribute."""

    def probabilities(texts: Sequence[str]) -> list[float]:
        # Continuations, which may begin within a word: unlike whole texts, they get no space.
        found = attribute.probability([tokenizer(text).input_ids for text in texts])
        return [float(one) for one in found]

    scores = {name: score_rows(probabilities, one.texts) for name, one in kept.methods.items()}
    return kept.judged({OWN: scores})


def score_rows(
    judge: Callable[[Sequence[str]], Sequence[float]], texts: Sequence[Sequence[str]]
) -> list[list[float | None]]:
    """Score all texts that are not blank, at once; a blank text has no score."""
    flat = [text for row in texts for text in row if text.strip()]
    judged = iter(judge(flat))
    return [[float(next(judged)) if text.strip() else None for text in row] for row in texts]


def compare_methods(kept: KeptTexts, suite: Suite) -> Scored:
    """Measure and compare judged texts."""
    scores = {
        judge: {name: method.scores_by(judge) for name, method in kept.methods.items()}
        for judge in kept.header["judges"]
    }
    measured = measure(kept, scores, suite.judges)
    own = None
    if all(OWN in row for method in kept.methods.values() for row in method.scores):
        means = {name: metrics.mean_score(one.scores_by(OWN)) for name, one in kept.methods.items()}
        own = replace(measured, judges={OWN: means})
    return Scored(measured, kept.header["judges"], agreement(scores, measured), own)
