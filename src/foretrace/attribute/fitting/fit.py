"""Fitting an attribute: from texts and scores to products of token weights, in a second."""

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
from foretrace.attribute.fitting.counts import Texts, token_counts
from foretrace.attribute.fitting.held_out import figures, ranking
from foretrace.attribute.fitting.objectives import Array
from foretrace.attribute.terms import MAX_TERMS, Terms
from foretrace.attribute.transform import LogitAffine
from foretrace.errors import InvalidInputError

Indices = NDArray[np.int64]

OBJECTIVES = ("cross-entropy", "log-mse")
# The plain scores first: another transform must rank held-out texts clearly better.
CHOICES = (LogitAffine(), LogitAffine(2.0, 0.0), LogitAffine(3.0, -3.0))
LEAST_GAIN = 0.005  # in AUC; less is chance on some thousands of texts
SMALLEST_COST = 1e-4  # a hundred tokens of less change a probability by less than one percent


@dataclass(frozen=True)
class FitConfig:
    """How to fit."""

    objective: str = "cross-entropy"
    """Or "log-mse": the paper's, faster, and it ranks less well."""
    terms: int = 1
    """Products in the mixture at most; more than one by cross-entropy only."""
    transform: LogitAffine | None = None
    """What scores go through before they are fitted; chosen on held-out texts if not given. By
    absence, what scores of the absence go through."""
    penalty: float = 1.0
    """Texts that have the attribute that every token counts as seen in, beside the real ones."""
    min_texts: int = 2
    """Tokens in fewer texts get no weight."""
    by_absence: bool = False
    """Fit a product to the absence of the attribute, and negate it: right for what single tokens
    reveal (a topic, a role), and what the paper advises for what is rare."""
    held_out: float = 0.1
    """Share of the texts to hold out, if no validation texts are given."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise InvalidInputError(
                f"The objective is {' or '.join(OBJECTIVES)}, not '{self.objective}'."
            )
        if not 1 <= self.terms <= MAX_TERMS or (self.terms > 1 and self.objective == "log-mse"):
            raise InvalidInputError(
                f"An attribute of {self.terms} terms cannot be fitted by {self.objective}: log-mse "
                f"fits one, cross-entropy 1 to {MAX_TERMS:,}."
            )
        penalised = isfinite(self.penalty) and self.penalty >= 0
        if not (penalised and self.min_texts >= 1 and 0 < self.held_out < 1 and self.seed >= 0):
            raise InvalidInputError(
                f"The penalty must be 0 or more, min_texts 1 or more, held_out between 0 and 1 and "
                f"the seed 0 or more; they are {self.penalty}, {self.min_texts}, {self.held_out} "
                f"and {self.seed}."
            )


@dataclass(frozen=True)
class Examples:
    """Texts as counts of tokens, and their probabilities of having the attribute."""

    counts: csr_array  # (n, V)
    scores: Array  # (n,)
    groups: Indices  # (n,): what is of one group is held out together, or not at all
    strata: Indices  # (n,): of every one, the same share is held out

    @classmethod
    def of(
        cls,
        token_ids: Texts,
        scores: Sequence[float] | Tensor,
        vocab_size: int,
        groups: Sequence[int] | None = None,
    ) -> Self:
        """Count tokens, and check scores; every text is a group of its own unless it is said."""
        found = np.asarray(torch.as_tensor(scores, dtype=torch.float64).cpu())
        _require_one_each(len(token_ids), "scores", found)
        wrong = ~((found >= 0) & (found <= 1))
        if wrong.any():
            raise InvalidInputError(
                f"Scores must be probabilities in [0, 1], but {int(wrong.sum())} of {len(found)} "
                f"are not: the first is {found[wrong][0]}, at {int(wrong.argmax())}. Divide them "
                f"by their greatest, or leave these texts out."
            )
        own = np.arange(len(found)) if groups is None else np.asarray(groups, dtype=np.int64)
        _require_one_each(len(token_ids), "groups", own)
        return cls(token_counts(token_ids, vocab_size), found, own, (found >= 0.5).astype(np.int64))

    @classmethod
    def labelled(
        cls,
        token_ids: Texts,
        labels: Sequence[str],
        numbers: Mapping[str, int],
        vocab_size: int,
        groups: Sequence[int] | None = None,
    ) -> Self:
        """Count tokens of texts that have a label instead of a score; unknown ones are -1."""
        strata = np.array([numbers.get(label, -1) for label in labels], dtype=np.int64)
        _require_one_each(len(token_ids), "labels", strata)
        return replace(cls.of(token_ids, [0.0] * len(strata), vocab_size, groups), strata=strata)

    def of_label(self, number: int) -> Self:
        """Score the texts by whether they have this label."""
        return replace(self, scores=(self.strata == number).astype(np.float64))

    def __len__(self) -> int:
        return len(self.scores)

    @property
    def texts(self) -> int:
        """How many texts there are, whole ones."""
        return len(np.unique(self.groups))

    def rows(self, which: Indices) -> Self:
        """Take some of the rows."""
        return replace(
            self,
            counts=self.counts[which],
            scores=self.scores[which],
            groups=self.groups[which],
            strata=self.strata[which],
        )

    def split(self, share: float, seed: int) -> tuple[Self, Self]:
        """Part texts at random: (to fit, held out). Of every stratum, some are left to fit."""
        groups, first = np.unique(self.groups, return_index=True)
        strata = self.strata[first]
        order = np.random.default_rng(seed).permutation(len(groups))
        order = order[np.argsort(strata[order], kind="stable")]
        _, begins, counts = np.unique(strata[order], return_index=True, return_counts=True)
        place = np.arange(len(groups)) - np.repeat(begins, counts)  # within its stratum
        taken = order[place < np.repeat((share * counts).astype(int), counts)]
        if not len(taken):
            raise InvalidInputError(
                f"{len(groups)} texts are too few to hold some out: an attribute is fitted to some "
                f"thousands, and wants a few dozens at the very least."
            )
        held_out = np.isin(self.groups, groups[taken])
        return self.rows(np.flatnonzero(~held_out)), self.rows(np.flatnonzero(held_out))


def _require_one_each(texts: int, what: str, found: Array | Indices) -> None:
    if found.shape != (texts,):
        raise InvalidInputError(
            f"There are {texts} texts, but {what} of shape {found.shape}. Give one for each text."
        )


def fit_terms(
    examples: Examples, held_out: Examples, config: FitConfig
) -> tuple[Terms, dict[str, Any]]:
    """Fit, and tell how well it does on held-out texts."""
    if float(np.ptp(examples.scores)) == 0:
        raise InvalidInputError(
            f"All {len(examples)} scores are equal: there is nothing to learn from them. Add texts "
            f"that have the attribute, and texts that have not."
        )
    choices = CHOICES if config.transform is None else (config.transform,)
    if ((examples.scores == 0) | (examples.scores == 1)).all():
        choices = choices[:1]  # a transform moves neither 0 nor 1
    candidates = [_fit_under(transform, examples, held_out, config) for transform in choices]
    best = candidates[0]
    for other in candidates[1:]:
        if (other.auc or 0.0) > (best.auc or 0.0) + LEAST_GAIN:
            best = other
    facts = {
        **asdict(config),
        "transform": asdict(best.transform),
        "transform_chosen": config.transform is None,
        "texts": examples.texts,
        "windows": len(examples),
        "held_out_texts": held_out.texts,
        "held_out_windows": len(held_out),
        "tokens_with_weight": len(best.terms.tokens),
        "auc": best.auc,
        **figures(best.predicted, held_out.scores, _targets(held_out, best.transform, config)),
    }
    return best.terms, facts


class _Candidate(NamedTuple):
    """What a transform leads to."""

    transform: LogitAffine
    terms: Terms
    predicted: Array  # probabilities of the held-out texts
    auc: float | None


def _fit_under(
    transform: LogitAffine, examples: Examples, held_out: Examples, config: FitConfig
) -> _Candidate:
    """Fit products to the examples, and let them predict the held-out texts."""
    targets = _targets(examples, transform, config)
    found = _solve(examples.counts, 1 - targets if config.by_absence else targets, config)
    terms = found.negated() if config.by_absence else found
    counts = held_out.counts[:, terms.tokens.numpy()]
    sums = torch.from_numpy(counts @ terms.log_weights.double().numpy().T)
    predicted = terms.probability(sums).numpy()
    return _Candidate(transform, terms, predicted, ranking(predicted, held_out.scores))


def _targets(examples: Examples, transform: LogitAffine, config: FitConfig) -> Array:
    """Give what is fitted, as probabilities of having the attribute."""
    if config.by_absence:
        return 1 - transform(torch.from_numpy(1 - examples.scores)).numpy()
    return transform(torch.from_numpy(examples.scores)).numpy()


def _solve(counts: csr_array, targets: Array, config: FitConfig) -> Terms:
    """Fit products to targets, over the tokens that are worth a weight."""
    tokens = _worth_a_weight(counts, targets, config.min_texts)
    counts = counts[:, tokens]
    if not len(tokens):
        return Terms.one()
    if config.objective == "log-mse":
        found = objectives.log_mse(counts, targets, config.penalty)
    else:
        found = objectives.cross_entropy(counts, targets, config.penalty, config.terms, config.seed)
    kept = (found.costs >= SMALLEST_COST).any(0)
    return Terms(
        torch.from_numpy(found.coefficients),
        torch.from_numpy(tokens[kept]).to(torch.int32),
        -torch.from_numpy(found.costs[:, kept]).float(),
    )


def _worth_a_weight(counts: csr_array, targets: Array, min_texts: int) -> Indices:
    """List the tokens that can get a cost: some text must have them and lack the attribute."""
    texts = np.bincount(counts.indices, minlength=counts.shape[1])
    lacking = np.bincount(counts[targets < 1].indices, minlength=counts.shape[1])
    return np.flatnonzero((texts >= min_texts) & (lacking > 0))
