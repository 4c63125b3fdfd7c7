"""Fit products of token weights to scored texts."""

import numpy as np
import torch
from scipy.sparse import csr_array

from foretrace.attribute.fitting import objectives
from foretrace.attribute.fitting.candidate import Candidate, make_candidate, targets
from foretrace.attribute.fitting.examples import Examples, Indices
from foretrace.attribute.fitting.fit_config import FitConfig
from foretrace.attribute.fitting.objectives import Array
from foretrace.attribute.terms import Terms
from foretrace.attribute.transform import LogitAffine

# The identity comes first: another transform must rank held-out texts clearly better.
TRANSFORMS = (LogitAffine(), LogitAffine(2.0, 0.0), LogitAffine(3.0, -3.0))
MIN_AUC_GAIN = 0.005  # less is within chance for some thousands of texts
MIN_COST = 1e-4  # a hundred tokens with less change a probability by less than one percent


def fit_products(examples: Examples, held_out: Examples, config: FitConfig) -> Candidate:
    """Fit a product, or a mixture of products; choose the transform on the held-out texts."""
    transforms = TRANSFORMS if config.transform is None else (config.transform,)
    if ((examples.scores == 0) | (examples.scores == 1)).all():
        transforms = transforms[:1]  # a transform changes neither 0 nor 1
    candidates = [_fit_with(transform, examples, held_out, config) for transform in transforms]
    best = candidates[0]
    for other in candidates[1:]:
        if (other.auc or 0.0) > (best.auc or 0.0) + MIN_AUC_GAIN:
            best = other
    return best


def _fit_with(
    transform: LogitAffine, examples: Examples, held_out: Examples, config: FitConfig
) -> Candidate:
    """Fit terms under a transform, and predict the held-out texts."""
    wanted = targets(examples, transform, config)
    fitted = _fit_terms(examples.counts, 1 - wanted if config.by_absence else wanted, config)
    terms = fitted.negated() if config.by_absence else fitted
    counts = held_out.counts[:, terms.tokens.numpy()]
    sums = torch.from_numpy(counts @ terms.log_weights.double().numpy().T)
    predicted = terms.probability(sums).numpy()
    return make_candidate(terms, predicted, transform, examples, held_out, config)


def _fit_terms(counts: csr_array, wanted: Array, config: FitConfig) -> Terms:
    """Fit products to targets, over the tokens that can get a weight below 1."""
    tokens = _weightable_tokens(counts, wanted, config.min_texts)
    counts = counts[:, tokens]
    if not len(tokens):
        return Terms.one()
    if config.objective == "log-mse":
        mixture = objectives.log_mse(counts, wanted, config.penalty)
    else:
        mixture = objectives.cross_entropy(
            counts, wanted, config.penalty, config.terms, config.seed
        )
    kept = (mixture.costs >= MIN_COST).any(0)
    return Terms(
        torch.from_numpy(mixture.coefficients),
        torch.from_numpy(tokens[kept]).to(torch.int32),
        -torch.from_numpy(mixture.costs[:, kept]).float(),
    )


def _weightable_tokens(counts: csr_array, wanted: Array, min_texts: int) -> Indices:
    """Return the tokens that can get a cost: some text with a target below 1 contains them."""
    texts = np.bincount(counts.indices, minlength=counts.shape[1])
    lacking = np.bincount(counts[wanted < 1].indices, minlength=counts.shape[1])
    return np.flatnonzero((texts >= min_texts) & (lacking > 0))
