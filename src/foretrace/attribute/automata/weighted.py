"""What terms remember of a text beside its tokens' weights: where an automaton ends."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from foretrace.attribute.automata.dfa import Automaton
from foretrace.errors import InvalidInputError


@dataclass(frozen=True, eq=False)
class Memory:
    """An automaton that reads the text, and what the state it ends in is worth to each term."""

    automaton: Automaton
    finals: Tensor  # (K, Q) float64, in [0, 1]

    def __post_init__(self) -> None:
        wrong = self.finals.dim() != 2 or self.finals.shape[1] != self.automaton.num_states
        if wrong or not bool(((self.finals >= 0) & (self.finals <= 1)).all()):
            raise InvalidInputError(
                f"Each of the {self.automaton.num_states} states of an automaton needs a number in "
                f"[0, 1] for every term: what it is worth to end there."
            )

    def resting(self, tokens: Sequence[int]) -> Self:
        """Give the same, but that these tokens are not read."""
        return type(self)(self.automaton.resting(tokens), self.finals)

    def reading_below(self, vocab_size: int) -> Self:
        """Give the same, of a vocabulary that ends there."""
        return type(self)(self.automaton.reading_below(vocab_size), self.finals)

    def fewest(self, vocab_size: int) -> Tensor:
        """Count the tokens it takes at least from each state to a worthy end: (Q,)."""
        return self.automaton.fewest((self.finals > 0).any(0), vocab_size)

    def reduced(self) -> Self | None:
        """Give the smallest that is worth the same; None if it does not matter where it ends."""
        if not len(self.finals):
            return None
        automaton, first = self.automaton.merged(self.finals)
        return None if automaton.is_idle else type(self)(automaton, self.finals[:, first])

    def log_finals(self, tokens: Tensor, texts: Tensor, count: int) -> Tensor:
        """Read texts: (N,) ids, and of which of the `count` each is, in order -> (count, K)."""
        lengths = torch.bincount(texts, minlength=count)
        begins = lengths.cumsum(0) - lengths
        states = torch.zeros(count, dtype=torch.long)
        for place in range(int(lengths.max()) if count else 0):
            going = (lengths > place).nonzero()[:, 0]
            states[going] = self.automaton.after(states[going], tokens[begins[going] + place])
        return self.finals.T[states].log()


def together(
    left: Memory | None, right: Memory | None, *terms: int
) -> tuple[Automaton, Tensor, Tensor]:
    """Give one automaton for both, and what its states are worth to the terms of each."""
    one, other = (
        memory or Memory(Automaton.idle(), torch.ones(count, 1, dtype=torch.float64))
        for memory, count in zip((left, right), terms, strict=True)
    )
    pair = one.automaton.beside(other.automaton)
    return pair.automaton, one.finals[:, pair.left], other.finals[:, pair.right]
