"""Fit an attribute: from scored texts to products of token weights, in about a second."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from torch import Tensor

from foretrace.attribute.fitting import objectives
from foretrace.attribute.fitting.counts import token_counts
from foretrace.attribute.fitting.held_out import auc, held_out_metrics
from foretrace.attribute.fitting.objectives import Array
from foretrace.attribute.terms import MAX_TERMS, Terms
from foretrace.attribute.texts import Texts
from foretrace.attribute.transform import LogitAffine
from foretrace.errors import InvalidInputError

Indices = NDArray[np.int64]

OBJECTIVES = ("cross-entropy", "log-mse")
# The identity comes first: another transform must rank held-out texts clearly better.
TRANSFORMS = (LogitAffine(), LogitAffine(2.0, 0.0), LogitAffine(3.0, -3.0))
MIN_AUC_GAIN = 0.005  # less is within chance for some thousands of texts
MIN_COST = 1e-4  # a hundred tokens with less change a probability by less than one percent


@dataclass(frozen=True)
class FitConfig:
    """The settings of a fit.

    Attributes:
        objective: "cross-entropy", or "log-mse": the paper's, which is faster and ranks less well.
        terms: The largest number of products in the mixture; 1 for log-mse.
        transform: The transform of the scores before the fit. By default, it is chosen on held-out
            texts. If `by_absence` is set, it applies to the scores of the absence.
        penalty: The number of texts with the attribute that are added for every token. More keeps
            rare tokens from extreme weights.
        min_texts: Tokens in fewer texts get no weight.
        by_absence: Whether to fit the absence of the attribute and negate the result. This suits
            attributes that single tokens reveal, such as a topic or a role. The paper recommends it
            for rare attributes.
        held_out: The share of the texts to hold out, if there are no validation texts.
        seed: The seed of the held-out split and of the mixture's start.

    Raises:
        InvalidInputError: If a setting is out of range.

    Example:
        >>> ft.FitConfig(by_absence=True).objective
        'cross-entropy'
    """

    objective: str = "cross-entropy"
    terms: int = 1
    transform: LogitAffine | None = None
    penalty: float = 1.0
    min_texts: int = 2
    by_absence: bool = False
    held_out: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise InvalidInputError(
                f"The objective must be {' or '.join(OBJECTIVES)}, not '{self.objective}'."
            )
        if not 1 <= self.terms <= MAX_TERMS or (self.terms > 1 and self.objective == "log-mse"):
            raise InvalidInputError(
                f"{self.objective} cannot fit {self.terms} terms: log-mse fits 1, cross-entropy "
                f"1 to {MAX_TERMS:,}."
            )
        valid_penalty = isfinite(self.penalty) and self.penalty >= 0
        if not (valid_penalty and self.min_texts >= 1 and 0 < self.held_out < 1 and self.seed >= 0):
            raise InvalidInputError(
                f"The penalty must be 0 or more, min_texts 1 or more, held_out between 0 and 1 and "
                f"the seed 0 or more; they are {self.penalty}, {self.min_texts}, {self.held_out} "
                f"and {self.seed}."
            )


@dataclass(frozen=True)
class Examples:
    """Texts as token counts, with their probabilities of having the attribute."""

    counts: csr_array  # (n, V)
    scores: Array  # (n,)
    groups: Indices  # (n,): texts of one group are held out together
    strata: Indices  # (n,): the same share of every stratum is held out

    @classmethod
    def from_scores(
        cls,
        token_ids: Texts,
        scores: Sequence[float] | Tensor,
        vocab_size: int,
        groups: Sequence[int] | None = None,
    ) -> Self:
        """Count the tokens of texts and check their scores.

        Without `groups`, every text is its own group. Texts with a score of at least 0.5 form one
        stratum, and the others a second one.
        """
        values = np.asarray(torch.as_tensor(scores, dtype=torch.float64).cpu())
        _check_one_per_text(len(token_ids), "scores", values)
        invalid = ~((values >= 0) & (values <= 1))
        if invalid.any():
            raise InvalidInputError(
                f"Scores must be probabilities in [0, 1], but {int(invalid.sum())} of "
                f"{len(values)} are not: the first is {values[invalid][0]}, at index "
                f"{int(invalid.argmax())}. Divide all scores by the largest, or remove these "
                f"texts."
            )
        default = np.arange(len(values))
        group_ids = default if groups is None else np.asarray(groups, dtype=np.int64)
        _check_one_per_text(len(token_ids), "groups", group_ids)
        strata = (values >= 0.5).astype(np.int64)
        return cls(token_counts(token_ids, vocab_size), values, group_ids, strata)

    @classmethod
    def from_labels(
        cls,
        token_ids: Texts,
        labels: Sequence[str],
        numbers: Mapping[str, int],
        vocab_size: int,
        groups: Sequence[int] | None = None,
    ) -> Self:
        """Count tokens of labelled texts; the number of a label is its stratum, -1 if unknown."""
        strata = np.array([numbers.get(label, -1) for label in labels], dtype=np.int64)
        _check_one_per_text(len(token_ids), "labels", strata)
        zeros = [0.0] * len(strata)
        return replace(cls.from_scores(token_ids, zeros, vocab_size, groups), strata=strata)

    def scored_by_label(self, number: int) -> Self:
        """Return a copy with score 1 for the texts of this label and 0 for all others."""
        return replace(self, scores=(self.strata == number).astype(np.float64))

    def __len__(self) -> int:
        return len(self.scores)

    @property
    def num_groups(self) -> int:
        """Return the number of groups: of texts, if the rows are windows of texts."""
        return len(np.unique(self.groups))

    def take(self, rows: Indices) -> Self:
        """Return a copy with these rows."""
        return replace(
            self,
            counts=self.counts[rows],
            scores=self.scores[rows],
            groups=self.groups[rows],
            strata=self.strata[rows],
        )

    def split(self, share: float, seed: int) -> tuple[Self, Self]:
        """Split groups at random into (to fit, held out). Every stratum keeps some to fit."""
        groups, first = np.unique(self.groups, return_index=True)
        strata = self.strata[first]
        order = np.random.default_rng(seed).permutation(len(groups))
        order = order[np.argsort(strata[order], kind="stable")]
        _, starts, counts = np.unique(strata[order], return_index=True, return_counts=True)
        rank = np.arange(len(groups)) - np.repeat(starts, counts)  # within its stratum
        selected = order[rank < np.repeat((share * counts).astype(int), counts)]
        if not len(selected):
            raise InvalidInputError(
                f"{len(groups)} texts are too few to hold some out. A fit needs a few dozen texts "
                f"at least, and some thousands to be good."
            )
        held_out = np.isin(self.groups, groups[selected])
        return self.take(np.flatnonzero(~held_out)), self.take(np.flatnonzero(held_out))


def _check_one_per_text(num_texts: int, name: str, values: Array | Indices) -> None:
    if values.shape != (num_texts,):
        raise InvalidInputError(
            f"There are {num_texts} texts, but {name} of shape {values.shape}. Pass one for each "
            f"text."
        )


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
