"""Fit products of token weights to scored texts, in about a second."""

from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.sparse import csr_array

from foretrace.attribute.fitting import objectives
from foretrace.attribute.fitting.examples import Examples, Indices
from foretrace.attribute.fitting.fit_config import FitConfig
from foretrace.attribute.fitting.held_out import auc, held_out_metrics
from foretrace.attribute.fitting.objectives import Array
from foretrace.attribute.terms import Terms
from foretrace.attribute.transform import LogitAffine
from foretrace.errors import InvalidInputError

# The identity comes first: another transform must rank held-out texts clearly better.
TRANSFORMS = (LogitAffine(), LogitAffine(2.0, 0.0), LogitAffine(3.0, -3.0))
MIN_AUC_GAIN = 0.005  # less is within chance for some thousands of texts
MIN_COST = 1e-4  # a hundred tokens with less change a probability by less than one percent


def fit_terms(
    examples: Examples, held_out: Examples, config: FitConfig
) -> tuple[Terms, dict[str, Any]]:
    """Fit terms; return them with a record of the settings and the held-out metrics."""
    if float(np.ptp(examples.scores)) == 0:
        raise InvalidInputError(
            f"All {len(examples)} scores are equal, so nothing can be fitted. Add texts with the "
            f"attribute and texts without it."
        )
    transforms = TRANSFORMS if config.transform is None else (config.transform,)
    if ((examples.scores == 0) | (examples.scores == 1)).all():
        transforms = transforms[:1]  # a transform changes neither 0 nor 1
    candidates = [_fit_with(transform, examples, held_out, config) for transform in transforms]
    best = candidates[0]
    for other in candidates[1:]:
        if (other.auc or 0.0) > (best.auc or 0.0) + MIN_AUC_GAIN:
            best = other
    targets = _targets(held_out, best.transform, config)
    record = {
        **asdict(config),
        "transform": asdict(best.transform),
        "transform_chosen": config.transform is None,
        "texts": examples.num_groups,
        "windows": len(examples),
        "held_out_texts": held_out.num_groups,
        "held_out_windows": len(held_out),
        "tokens_with_weight": len(best.terms.tokens),
        "auc": best.auc,
        **held_out_metrics(best.predicted, held_out.scores, targets),
    }
    return best.terms, record


class _Candidate(NamedTuple):
    """The fit under one transform."""

    transform: LogitAffine
    terms: Terms
    predicted: Array  # probabilities of the held-out texts
    auc: float | None


def _fit_with(
    transform: LogitAffine, examples: Examples, held_out: Examples, config: FitConfig
) -> _Candidate:
    """Fit terms under a transform, and predict the held-out texts."""
    targets = _targets(examples, transform, config)
    fitted = _fit_products(examples.counts, 1 - targets if config.by_absence else targets, config)
    terms = fitted.negated() if config.by_absence else fitted
    counts = held_out.counts[:, terms.tokens.numpy()]
    sums = torch.from_numpy(counts @ terms.log_weights.double().numpy().T)
    predicted = terms.probability(sums).numpy()
    return _Candidate(transform, terms, predicted, auc(predicted, held_out.scores))


def _targets(examples: Examples, transform: LogitAffine, config: FitConfig) -> Array:
    """Return the transformed scores, as probabilities of having the attribute."""
    if config.by_absence:
        return 1 - transform(torch.from_numpy(1 - examples.scores)).numpy()
    return transform(torch.from_numpy(examples.scores)).numpy()


def _fit_products(counts: csr_array, targets: Array, config: FitConfig) -> Terms:
    """Fit products to targets, over the tokens that can get a weight below 1."""
    tokens = _weightable_tokens(counts, targets, config.min_texts)
    counts = counts[:, tokens]
    if not len(tokens):
        return Terms.one()
    if config.objective == "log-mse":
        mixture = objectives.log_mse(counts, targets, config.penalty)
    else:
        mixture = objectives.cross_entropy(
            counts, targets, config.penalty, config.terms, config.seed
        )
    kept = (mixture.costs >= MIN_COST).any(0)
    return Terms(
        torch.from_numpy(mixture.coefficients),
        torch.from_numpy(tokens[kept]).to(torch.int32),
        -torch.from_numpy(mixture.costs[:, kept]).float(),
    )


def _weightable_tokens(counts: csr_array, targets: Array, min_texts: int) -> Indices:
    """Return the tokens that can get a cost: some text with a target below 1 contains them."""
    texts = np.bincount(counts.indices, minlength=counts.shape[1])
    lacking = np.bincount(counts[targets < 1].indices, minlength=counts.shape[1])
    return np.flatnonzero((texts >= min_texts) & (lacking > 0))
