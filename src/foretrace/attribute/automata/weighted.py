"""Weighted automata: a DFA, and the weight of its final state in each term."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from foretrace.attribute.automata.dfa import DFA, UNREACHABLE
from foretrace.errors import InvalidInputError


@dataclass(frozen=True, eq=False)
class WeightedAutomaton:
    """A DFA that reads the text, and for each term the weight of the state that it ends in."""

    dfa: DFA
    final_weights: Tensor  # (K, Q) float64, in [0, 1]

    def __post_init__(self) -> None:
        weights, states = self.final_weights, self.dfa.num_states
        wrong_shape = weights.dim() != 2 or weights.shape[1] != states
        if wrong_shape or not bool(((weights >= 0) & (weights <= 1)).all()):
            raise InvalidInputError(
                f"An automaton of {states} states needs a final weight in [0, 1] for every term "
                f"and state."
            )

    def with_self_loops(self, tokens: Sequence[int]) -> Self:
        """Return a copy in which these tokens do not change the state."""
        return type(self)(self.dfa.with_self_loops(tokens), self.final_weights)

    def restricted(self, vocab_size: int) -> Self:
        """Return a copy without the tokens from `vocab_size` on."""
        return type(self)(self.dfa.restricted(vocab_size), self.final_weights)

    def min_tokens(self, vocab_size: int) -> Tensor:
        """Return the fewest tokens from each state to one with a positive final weight: (Q,)."""
        return self.dfa.min_tokens_to((self.final_weights > 0).any(0), vocab_size)

    def requires_text(self, vocab_size: int) -> bool:
        """Return whether some texts have no positive weight yet, but can still get one."""
        min_tokens = self.min_tokens(vocab_size)
        return bool(((min_tokens > 0) & (min_tokens < UNREACHABLE)).any())

    def minimized(self) -> Self | None:
        """Return the smallest equivalent automaton; None if all texts have the same weights."""
        if not len(self.final_weights):
            return None
        dfa, representatives = self.dfa.minimized(self.final_weights)
        return None if dfa.is_trivial else type(self)(dfa, self.final_weights[:, representatives])

    def log_final_weights(self, tokens: Tensor, text_index: Tensor, count: int) -> Tensor:
        """Return the log final weights of `count` texts: (count, K).

        `tokens` (N,) holds the ids of all texts one after the other, and `text_index` (N,) the text
        of each token, in ascending order.
        """
        lengths = torch.bincount(text_index, minlength=count)
        starts = lengths.cumsum(0) - lengths
        states = torch.zeros(count, dtype=torch.long)
        for position in range(int(lengths.max()) if count else 0):
            active = (lengths > position).nonzero()[:, 0]
            states[active] = self.dfa.step(states[active], tokens[starts[active] + position])
        return self.final_weights.T[states].log()


def align(
    left: WeightedAutomaton | None, right: WeightedAutomaton | None, *num_terms: int
) -> tuple[DFA, Tensor, Tensor]:
    """Return the product of both DFAs, and the final weights of each side over its states.

    `num_terms` are the numbers of terms of both sides. None stands for weights of 1.
    """
    first, second = (
        automaton or WeightedAutomaton(DFA.trivial(), torch.ones(count, 1, dtype=torch.float64))
        for automaton, count in zip((left, right), num_terms, strict=True)
    )
    product = first.dfa.product(second.dfa)
    return (
        product.dfa,
        first.final_weights[:, product.left],
        second.final_weights[:, product.right],
    )
