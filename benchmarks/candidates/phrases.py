"""Weights on short token sequences: an automaton that knows which of them has just ended."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array, hstack
from torch import Tensor

from foretrace.attribute.fitting import objectives
from foretrace.attribute.fitting.counts import token_counts
from foretrace.attribute.sorted_ids import find_sorted

Phrase = tuple[int, ...]
LENGTHS = (2, 3)


def _only() -> Tensor:
    return torch.zeros(1, dtype=torch.long)


@dataclass(frozen=True)
class Phrases:
    """An automaton over tokens: Q states, M tokens that it knows; without any, it stays at 0."""

    tokens: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))  # rising
    moves: Tensor = field(default_factory=lambda: torch.zeros(1, 0, dtype=torch.long))  # (Q, M)
    others: Tensor = field(default_factory=_only)  # (Q,): where all other tokens lead
    arrivals: Tensor = field(default_factory=lambda: torch.ones(1))  # (Q,): v

    @classmethod
    def of(cls, weights: Mapping[Phrase, float]) -> Self:
        """Build it, as Aho and Corasick do: states are beginnings of phrases."""
        tokens = sorted({token for phrase in weights for token in phrase})
        begun: dict[Phrase, int] = {(): 0}
        for phrase in weights:
            for end in range(1, len(phrase) + 1):
                begun.setdefault(phrase[:end], len(begun))
        moves = [[_longest((*text, token), begun) for token in tokens] for text in begun]
        arrivals = [
            float(np.prod([weights.get(text[start:], 1.0) for start in range(len(text))]))
            for text in begun
        ]
        return cls(
            torch.tensor(tokens),
            torch.tensor(moves),
            torch.zeros(len(begun), dtype=torch.long),
            torch.tensor(arrivals),
        )

    def after(self, places: Tensor, tokens: Tensor) -> Tensor:
        """Move: (n,), (n,) -> (n,)."""
        if not len(self.tokens):
            return places
        column, found = find_sorted(self.tokens, tokens)
        return torch.where(found, self.moves[places, column], self.others[places])


def _longest(text: Phrase, begun: Mapping[Phrase, int]) -> int:
    """Find the longest end of a text that begins a phrase."""
    return next(begun[text[at:]] for at in range(len(text) + 1) if text[at:] in begun)


def fit(
    texts: Sequence[Sequence[int]],
    targets: NDArray[np.float64],
    vocab_size: int,
    count: int,
    least: int = 15,
) -> tuple[NDArray[np.float64], dict[Phrase, float]]:
    """Fit costs of tokens and of the phrases that explain most of what tokens leave unexplained."""
    plain = token_counts(texts, vocab_size)
    used = np.flatnonzero(np.bincount(plain.indices, minlength=vocab_size) >= 2)
    columns = plain[:, used]
    costs = objectives.cross_entropy(columns, targets, 1.0, 1, 0).costs[0]
    chosen: list[Phrase] = []
    if count:
        rest = targets - np.exp(-(columns @ costs))
        seen = Counter(phrase for text in texts for phrase in set(_within(text)))
        candidates = [phrase for phrase, often in seen.items() if often >= least]
        counted = counts_of(texts, candidates)
        often = np.asarray(counted.sum(0)).ravel()
        order = np.argsort((counted.T @ rest) / np.sqrt(often + 1))
        chosen = [candidates[place] for place in order[:count]]
        joined = hstack([columns, counts_of(texts, chosen)]).tocsr()
        costs = objectives.cross_entropy(csr_array(joined), targets, 1.0, 1, 0).costs[0]
    own = np.zeros(vocab_size)
    own[used] = costs[: len(used)]
    weights = np.exp(-costs[len(used) :])
    return own, dict(zip(chosen, weights.tolist(), strict=True))


def counts_of(texts: Sequence[Sequence[int]], phrases: Sequence[Phrase]) -> csr_array:
    """Count phrases in texts: (texts, phrases)."""
    number = {phrase: place for place, phrase in enumerate(phrases)}
    found = [
        (row, number[phrase])
        for row, text in enumerate(texts)
        for phrase in _within(text)
        if phrase in number
    ]
    rows, columns = np.array(found, dtype=np.int64).reshape(-1, 2).T
    return csr_array((np.ones(len(rows)), (rows, columns)), (len(texts), len(phrases)))


def _within(text: Sequence[int]) -> list[Phrase]:
    """List a text's phrases, as often as they occur."""
    return [
        tuple(text[at : at + length]) for length in LENGTHS for at in range(len(text) - length + 1)
    ]
