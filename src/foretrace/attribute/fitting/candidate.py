"""A fitted classifier with its predictions, and the record that is stored with the attribute."""

from dataclasses import asdict
from typing import Any, NamedTuple

import torch

from foretrace.attribute.evidence import Evidence
from foretrace.attribute.fitting.examples import Examples
from foretrace.attribute.fitting.fit_config import FitConfig
from foretrace.attribute.fitting.held_out import auc, held_out_metrics
from foretrace.attribute.fitting.objectives import Array
from foretrace.attribute.terms import Terms
from foretrace.attribute.transform import LogitAffine


class Candidate(NamedTuple):
    """A fit by one objective under one transform."""

    objective: str
    transform: LogitAffine
    terms: Terms
    evidence: tuple[Evidence, ...]
    predicted: Array  # probabilities of the held-out texts
    auc: float | None
    record: dict[str, Any]  # of the settings and the held-out metrics


def make_candidate(
    fitted: Terms | Evidence,
    predicted: Array,
    transform: LogitAffine,
    examples: Examples,
    held_out: Examples,
    config: FitConfig,
) -> Candidate:
    """Measure a fit on the held-out texts."""
    terms, evidence = (Terms.one(), (fitted,)) if isinstance(fitted, Evidence) else (fitted, ())
    rank = auc(predicted, held_out.scores)
    record = {
        **asdict(config),
        "keep": len(config.keep),
        "transform": asdict(transform),
        "transform_chosen": config.transform is None and config.objective != "evidence",
        "texts": examples.num_groups,
        "windows": len(examples),
        "held_out_texts": held_out.num_groups,
        "held_out_windows": len(held_out),
        "tokens_with_weight": len(fitted.tokens),
        "auc": rank,
        **held_out_metrics(predicted, held_out.scores, targets(held_out, transform, config)),
    }
    return Candidate(config.objective, transform, terms, evidence, predicted, rank, record)


def targets(examples: Examples, transform: LogitAffine, config: FitConfig) -> Array:
    """Return the transformed scores, as probabilities of having the attribute."""
    if config.by_absence:
        return 1 - transform(torch.from_numpy(1 - examples.scores)).numpy()
    return transform(torch.from_numpy(examples.scores)).numpy()
