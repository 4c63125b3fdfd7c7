"""Deterministic finite automata over token classes, and the weights of their final states.

A product of token weights cannot express that a phrase occurs. A DFA can: it changes its state with
every token, and attributes weight the state that it ends in. Tokens with the same transitions form
a class.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from foretrace.attribute.token_ids import find_sorted
from foretrace.errors import InvalidInputError

MAX_STATES = 512  # every state multiplies the size of a lookahead table
UNREACHABLE = torch.iinfo(torch.int32).max


@dataclass(frozen=True, eq=False)
class DFA:
    """A DFA with start state 0; a token of class c leads from state q to `transitions[q, c]`."""

    tokens: Tensor  # (M,) int32, ascending; all other tokens are of class 0
    classes: Tensor  # (M,) int32, at least 1
    transitions: Tensor  # (Q, C) int32

    def __post_init__(self) -> None:
        ascending = bool((self.tokens[1:] > self.tokens[:-1]).all())
        is_table = self.transitions.dim() == 2 and self.transitions.numel() > 0
        same_shape = self.tokens.shape == self.classes.shape
        if not (is_table and same_shape and ascending) or bool((self.tokens < 0).any()):
            raise InvalidInputError(
                "An automaton needs distinct token ids in ascending order, one class for each "
                "token, and a two-dimensional table of transitions."
            )
        states, classes = self.transitions.shape
        ranges = ((self.classes, 1, classes), (self.transitions, 0, states))
        if any(bool(((ids < low) | (ids >= high)).any()) for ids, low, high in ranges):
            raise InvalidInputError(
                f"An automaton of {states} states and {classes} classes refers to others."
            )
        if states > MAX_STATES:
            raise InvalidInputError(
                f"The automaton has {states:,} states, but at most {MAX_STATES:,} are allowed. Use "
                f"fewer or shorter texts in one expression."
            )

    @classmethod
    def trivial(cls) -> Self:
        """Return the DFA of one state."""
        none = torch.zeros(0, dtype=torch.int32)
        return cls(none, none, torch.zeros(1, 1, dtype=torch.int32))

    @classmethod
    def from_state_maps(cls, maps: Tensor, map_index: Tensor) -> Self:
        """Build a DFA from the state map of every token.

        `maps` (C, Q) lists the distinct maps from a state to the next one, and `map_index` (V,) the
        map of each token. The most frequent map becomes class 0, whose tokens are not stored.
        """
        counts = torch.bincount(map_index, minlength=len(maps))
        order = counts.argsort(descending=True, stable=True)
        classes = _inverse(order)[map_index]
        tokens = classes.nonzero()[:, 0]
        return cls(tokens.int(), classes[tokens].int(), maps[order].T.int().contiguous())

    @property
    def num_states(self) -> int:
        """Return the number of states, Q."""
        return self.transitions.shape[0]

    @cached_property
    def is_trivial(self) -> bool:
        """Return whether there is only one state."""
        return self.num_states == 1

    def class_of(self, tokens: Tensor) -> Tensor:
        """Return the classes of tokens: (...) ids -> (...)."""
        if not len(self.tokens):
            return torch.zeros_like(tokens)
        index, found = find_sorted(self.tokens, tokens)
        return torch.where(found, self.classes[index].to(tokens.dtype), 0)

    def step(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Return the next states: (...) states, (...) token ids -> (...) states."""
        return self.transitions[states.long(), self.class_of(tokens).long()].to(states.dtype)

    def with_self_loops(self, tokens: Sequence[int]) -> Self:
        """Return a copy in which these tokens, such as end-of-text, do not change the state."""
        if self.is_trivial or not tokens:
            return self
        looping = torch.tensor(sorted(set(tokens)), dtype=torch.int32)
        kept = ~torch.isin(self.tokens, looping)
        all_tokens = torch.cat([self.tokens[kept], looping])
        new_class = torch.full_like(looping, self.transitions.shape[1])
        order = all_tokens.argsort()
        classes = torch.cat([self.classes[kept], new_class])[order]
        self_loops = torch.arange(self.num_states, dtype=torch.int32)[:, None]
        transitions = torch.cat([self.transitions, self_loops], 1)
        return type(self)(all_tokens[order], classes, transitions)

    def product(self, other: Self) -> tuple[Self, Tensor, Tensor]:
        """Return the product automaton, and the state of each factor in every state of it: (Q,).

        It has the pairs of states that can be reached.
        """
        if self.is_trivial and other.is_trivial:
            start = torch.zeros(1, dtype=torch.long)
            return self.trivial(), start, start
        tokens = torch.unique(torch.cat([self.tokens, other.tokens]))
        pairs = torch.stack([self.class_of(tokens), other.class_of(tokens)], 1)
        pairs = torch.cat([torch.zeros(1, 2, dtype=pairs.dtype), pairs])  # class 0 of both
        classes, class_index = torch.unique(pairs, dim=0, return_inverse=True)
        left = self.transitions[:, classes[:, 0].long()]
        right = other.transitions[:, classes[:, 1].long()]
        numbers = {(0, 0): 0}
        transitions: list[list[int]] = []
        for a, b in (queue := [(0, 0)]):  # grows during the iteration
            row = []
            for pair in zip(left[a].tolist(), right[b].tolist(), strict=True):
                if pair not in numbers:
                    numbers[pair] = len(numbers)
                    queue.append(pair)
                row.append(numbers[pair])
            transitions.append(row)
            if len(numbers) > MAX_STATES:
                break  # the constructor below refuses it
        missing = [[0] * len(classes)] * (len(numbers) - len(transitions))
        table = torch.tensor(transitions + missing)
        states = torch.tensor(list(numbers))
        dfa = type(self)(tokens.int(), class_index[1:].int(), table.int())
        return dfa, states[:, 0], states[:, 1]

    def minimized(self, outputs: Tensor) -> tuple[Self, Tensor]:
        """Return the smallest DFA with the same outputs (n, Q) after every text.

        The second result is one equivalent state of this DFA for each of its states.
        """
        if self.is_trivial:
            return self, torch.zeros(1, dtype=torch.long)
        _, block = torch.unique(outputs, dim=1, return_inverse=True)
        count = 0
        while (num_blocks := int(block.max()) + 1) > count:  # Moore's partition refinement
            count = num_blocks
            signature = torch.cat([block[:, None], block[self.transitions.long()]], 1)
            _, block = torch.unique(signature, dim=0, return_inverse=True)
        representative = {int(block[0]): 0}  # of every block that can be reached
        for state in (queue := [0]):  # grows during the iteration
            for target in self.transitions[state].tolist():
                if int(block[target]) not in representative:
                    representative[int(block[target])] = target
                    queue.append(target)
        if len(representative) == 1:
            return type(self).trivial(), torch.zeros(1, dtype=torch.long)
        states = torch.tensor(list(representative.values()))
        number = torch.zeros(count, dtype=torch.long)
        number[torch.tensor(list(representative))] = torch.arange(len(representative))
        transitions = number[block[self.transitions[states].long()]]
        return self._with_merged_classes(transitions), states

    def _with_merged_classes(self, transitions: Tensor) -> Self:
        """Return a DFA with this table, in which equal columns are one class; 0 stays class 0."""
        columns, column_index = torch.unique(transitions, dim=1, return_inverse=True)
        order = torch.arange(columns.shape[1])
        order[0], order[column_index[0]] = int(column_index[0]), 0  # swap
        classes = _inverse(order)[column_index][self.classes.long()]
        stored = classes > 0
        return type(self)(self.tokens[stored], classes[stored].int(), columns[:, order].int())

    def restricted(self, vocab_size: int) -> Self:
        """Return a copy without the tokens from `vocab_size` on."""
        kept = self.tokens < vocab_size
        return type(self)(self.tokens[kept], self.classes[kept], self.transitions)

    def min_tokens_to(self, accepting: Tensor, vocab_size: int) -> Tensor:
        """Return the length of the shortest text from each state to an accepting one: (Q,).

        `accepting` is (Q,) bool. The length is `UNREACHABLE` where there is no such text. A class
        without tokens cannot be used.
        """
        classes = torch.unique(self.classes).long()
        if len(self.tokens) < vocab_size:
            classes = torch.cat([torch.zeros(1, dtype=torch.long), classes])
        transitions = self.transitions[:, classes].long()
        distance = torch.where(accepting, 0, UNREACHABLE)
        for _ in range(self.num_states if len(classes) else 0):
            nearest = distance[transitions].min(1).values
            onward = torch.where(nearest < UNREACHABLE, nearest + 1, UNREACHABLE)
            shorter = torch.minimum(distance, onward)
            if torch.equal(shorter, distance):
                break
            distance = shorter
        return distance


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

    def accepts(self, tokens: Sequence[int], vocab_size: int) -> bool:
        """Return whether a text has a positive weight. Tokens from `vocab_size` on are skipped."""
        needed, transitions = self.min_tokens(vocab_size).tolist(), self.dfa.transitions.tolist()
        state = 0
        for token_class in self._classes(tokens, vocab_size):
            state = transitions[state][token_class]
        return bool(needed[state] == 0)

    def has_required(self, tokens: Sequence[int], vocab_size: int) -> bool:
        """Return whether a text has what is required, also if it has what is forbidden.

        Forbidden tokens are skipped. If tokens are forbidden only because of those before them, as
        after a forbidden word, the automaton goes back to the last state that allows them.
        """
        needed, transitions = self.min_tokens(vocab_size).tolist(), self.dfa.transitions.tolist()
        states = [0]
        for token_class in self._classes(tokens, vocab_size):
            if needed[transitions[0][token_class]] >= UNREACHABLE:
                continue
            while needed[transitions[states[-1]][token_class]] >= UNREACHABLE:
                states.pop()
            states.append(transitions[states[-1]][token_class])
        return any(needed[state] == 0 for state in states)

    def _classes(self, tokens: Sequence[int], vocab_size: int) -> list[int]:
        known = [token for token in tokens if token < vocab_size]
        classes: list[int] = self.dfa.class_of(torch.tensor(known, dtype=torch.long)).tolist()
        return classes

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
    dfa, left_states, right_states = first.dfa.product(second.dfa)
    return dfa, first.final_weights[:, left_states], second.final_weights[:, right_states]


def _inverse(permutation: Tensor) -> Tensor:
    """Return the inverse of a permutation: (n,) -> (n,)."""
    inverse = torch.empty_like(permutation)
    inverse[permutation] = torch.arange(len(permutation), device=permutation.device)
    return inverse
