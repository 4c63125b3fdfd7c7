"""Judge the texts of a suite, and read how well its judges agree with reference scores."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from foretrace.evaluate.metrics import Scores
from foretrace.evaluate.scoring import Scorer
from foretrace.evaluate.suite import Suite
from peers.comparisons import Agreement, Measured, agreement, measure
from peers.kept import KeptTexts


class Scored(NamedTuple):
    """The measurements of a suite, and what is known about its judges."""

    measured: Measured
    judges: Mapping[str, Mapping[str, Any]]
    """The agreement of every judge with reference scores."""
    agreement: Agreement
    """The agreement of both judges."""


def score(kept: KeptTexts, suite: Suite) -> Scored:
    """Judge all texts by the suite's judges. Scores are kept beside the outputs of the suite."""
    results = Path(os.environ["FORETRACE_RESULTS"])
    scores: dict[str, dict[str, Scores]] = {}
    judges = {}
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
    measured = measure(kept, scores, suite.judges)
    return Scored(measured, judges, agreement(scores, measured))
