"""The settings of a fit, and a fitted classifier with its metrics on held-out texts."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from operator import index
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from foretrace.attribute.evidence import Evidence
from foretrace.attribute.fitting.examples import Array, Examples
from foretrace.attribute.terms import MAX_TERMS, Terms
from foretrace.attribute.transform import LogitAffine
from foretrace.errors import InvalidInputError

OBJECTIVES = ("auto", "cross-entropy", "log-mse", "evidence")
MIXTURE_OBJECTIVES = ("auto", "cross-entropy")
BINS = 20


@dataclass(frozen=True)
class FitConfig:
    """The settings of a fit.

    Attributes:
        objective: How to fit. "cross-entropy" fits a product of weights of at most 1: what a text
            must avoid. "log-mse" does the same as the paper does, which is faster and ranks less
            well. "evidence" fits log-odds by logistic regression: tokens speak for and against.
            "auto" fits evidence if there are embeddings of the LM. Otherwise it fits by
            cross-entropy and evidence, and keeps evidence unless the product ranks held-out texts
            clearly better. The record of the fit says why.
        terms: The largest number of products in the mixture; 1 for log-mse and evidence. With
            "auto", more than 1 means cross-entropy.
        transform: The transform of the scores before the fit. By default, a product chooses it on
            held-out texts, and evidence uses plain scores.
        penalty: More keeps rare tokens from extreme values. For products, the number of texts with
            the attribute that are added for every token. For evidence, the factor of a squared
            (L2) penalty: at 1, the prior of the reward of a token in n of N texts has the standard
            deviation 0.1 log(N / n), and less for tokens that the language model writes often.
        min_texts: Tokens in fewer texts get no weight and no reward.
        held_out: The share of the texts to hold out, if there are no validation texts.
        seed: The seed of the held-out split and of the mixture's start.
        keep: The ids of tokens that must not decide. They get no weight and no reward, and the
            other tokens are fitted without them.

    Raises:
        InvalidInputError: If a setting is out of range.

    Example:
        >>> ft.FitConfig(objective="evidence", keep=[7, 3]).keep
        (3, 7)
    """

    objective: str = "auto"
    terms: int = 1
    transform: LogitAffine | None = None
    penalty: float = 1.0
    min_texts: int = 2
    held_out: float = 0.1
    seed: int = 0
    keep: Sequence[int] = ()

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise InvalidInputError(
                f"The objective must be {' or '.join(OBJECTIVES)}, not '{self.objective}'."
            )
        max_terms = MAX_TERMS if self.objective in MIXTURE_OBJECTIVES else 1
        if not 1 <= self.terms <= max_terms:
            raise InvalidInputError(
                f"{self.objective} cannot fit {self.terms} terms: log-mse fits 1, evidence 1, "
                f"cross-entropy 1 to {MAX_TERMS:,}."
            )
        valid_penalty = isfinite(self.penalty) and self.penalty >= 0
        if not (valid_penalty and self.min_texts >= 1 and 0 < self.held_out < 1 and self.seed >= 0):
            raise InvalidInputError(
                f"The penalty must be 0 or more, min_texts 1 or more, held_out between 0 and 1 and "
                f"the seed 0 or more; they are {self.penalty}, {self.min_texts}, {self.held_out} "
                f"and {self.seed}."
            )
        try:
            keep = tuple(sorted({index(token) for token in self.keep}))
        except TypeError:
            raise InvalidInputError("`keep` must be a sequence of token ids.") from None
        object.__setattr__(self, "keep", keep)


class Candidate(NamedTuple):
    """A fit by one objective under one transform."""

    terms: Terms
    evidence: tuple[Evidence, ...]
    predicted: Array  # probabilities of the held-out texts
    auc: float | None
    record: dict[str, Any]  # of the settings and the held-out metrics

    def with_facts(self, **facts: object) -> "Candidate":
        """Return a copy with facts added to its record."""
        return self._replace(record={**self.record, **facts})


def make_candidate(
    fitted: Terms | Evidence,
    predicted: Array,
    transform: LogitAffine,
    examples: Examples,
    held_out: Examples,
    config: FitConfig,
    *,
    by_absence: bool = False,
) -> Candidate:
    """Measure a fit on the held-out texts."""
    terms, evidence = (Terms.one(), (fitted,)) if isinstance(fitted, Evidence) else (fitted, ())
    rank = auc(predicted, held_out.scores)
    record = {
        **asdict(config),
        "keep": len(config.keep),
        "by_absence": by_absence,
        "transform": asdict(transform),
        "transform_chosen": config.transform is None and config.objective != "evidence",
        "texts": examples.num_groups,
        "windows": len(examples),
        "held_out_texts": held_out.num_groups,
        "held_out_windows": len(held_out),
        "tokens_with_weight": len(fitted.tokens),
        "auc": rank,
        **held_out_metrics(predicted, held_out.scores, targets(held_out, transform, by_absence)),
    }
    return Candidate(terms, evidence, predicted, rank, record)


def targets(examples: Examples, transform: LogitAffine, by_absence: bool = False) -> Array:
    """Return the transformed scores; `by_absence` transforms the scores of the absence."""
    if by_absence:
        return 1 - transform(torch.from_numpy(1 - examples.scores)).numpy()
    return transform(torch.from_numpy(examples.scores)).numpy()


def auc(probabilities: Array, scores: Array) -> float | None:
    """Compute the AUC: how often a text with the attribute ranks above a text without it.

    None if no score separates the texts.
    """
    from sklearn.metrics import roc_auc_score

    positive = positives(scores)
    return None if positive is None else float(roc_auc_score(positive, probabilities))


def positives(scores: Array) -> NDArray[np.bool_] | None:
    """Return which texts have the attribute: their score is at least 0.5.

    If all texts are on one side, the median score is the threshold. None if the median does not
    separate them either.
    """
    for positive in (scores >= 0.5, scores > np.median(scores)):
        if 0 < positive.sum() < len(positive):
            return np.asarray(positive)
    return None


def held_out_metrics(probabilities: Array, scores: Array, targets: Array) -> dict[str, Any]:
    """Compute the calibration error, the calibration curve and histograms."""
    bins = calibration(probabilities, targets)
    error = sum(entry["texts"] * abs(entry["predicted"] - entry["target"]) for entry in bins)
    return {
        "calibration_error": error / len(scores),
        "calibration": bins,
        "histograms": {
            "scores": histogram(scores),
            "targets": histogram(targets),
            "fitted": histogram(probabilities),
        },
    }


def histogram(probabilities: Array) -> list[int]:
    """Count probabilities in equal bins over [0, 1]."""
    return [int(count) for count in np.histogram(probabilities, BINS, (0.0, 1.0))[0]]


def calibration(probabilities: Array, targets: Array) -> list[dict[str, float]]:
    """Average predictions and targets in equal bins of the prediction; skip empty bins."""
    bin_index = np.minimum((probabilities * BINS).astype(int), BINS - 1)
    return [
        {
            "texts": int((bin_index == i).sum()),
            "predicted": float(probabilities[bin_index == i].mean()),
            "target": float(targets[bin_index == i].mean()),
        }
        for i in np.unique(bin_index)
    ]
