"""Texts to fit to: token counts with scores or labels, and the held-out split."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from torch import Tensor

from foretrace.attribute.fitting.counts import token_counts
from foretrace.attribute.fitting.objectives import Array
from foretrace.attribute.texts import Texts
from foretrace.errors import InvalidInputError

Indices = NDArray[np.int64]


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

    def without(self, tokens: Sequence[int]) -> Self:
        """Return a copy whose texts do not contain these tokens."""
        if not len(tokens):
            return self
        if tokens[0] < 0 or tokens[-1] >= self.counts.shape[1]:
            raise InvalidInputError(
                f"The tokens to keep range from {tokens[0]} to {tokens[-1]}, but the vocabulary "
                f"has {self.counts.shape[1]} tokens. Was another tokenizer used?"
            )
        counts = self.counts.copy()
        counts.data[np.isin(counts.indices, np.asarray(tokens))] = 0.0
        counts.eliminate_zeros()
        return replace(self, counts=counts)

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
