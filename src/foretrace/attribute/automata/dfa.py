"""Readers of tokens that remember: a finite automaton, deterministic, over classes of tokens.

What no single token shows, a phrase or a word that must occur, an automaton sees: it moves with
every token, and attributes may weigh where it is. Tokens that move it alike are of one class.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import torch
from torch import Tensor

from foretrace.attribute.sorted_ids import lookup
from foretrace.errors import InvalidInputError

MOST_STATES = 512  # every state multiplies the tables of a lookahead


@dataclass(frozen=True, eq=False)
class Automaton:
    """Begins in state 0; a token of class c takes it from state q to `moves[q, c]`."""

    tokens: Tensor  # (M,) int32, rising; all others are of class 0
    classes: Tensor  # (M,) int32, at least 1
    moves: Tensor  # (Q, C) int32

    def __post_init__(self) -> None:
        ordered = bool((self.tokens[1:] > self.tokens[:-1]).all()) and not bool(
            (self.tokens < 0).any()
        )
        table = self.moves.dim() == 2 and self.moves.numel() > 0
        if not table or self.tokens.shape != self.classes.shape or not ordered:
            raise InvalidInputError(
                "An automaton needs its tokens once each, in rising order, a class for each of "
                "them, and a table of moves."
            )
        states, classes = self.moves.shape
        bounds = ((self.classes, 1, classes), (self.moves, 0, states))
        if any(bool(((each < low) | (each >= high)).any()) for each, low, high in bounds):
            raise InvalidInputError(
                f"An automaton of {states} states and {classes} classes names others."
            )
        if states > MOST_STATES:
            raise InvalidInputError(
                f"The automaton has {states:,} states, and {MOST_STATES:,} is the most. Use fewer "
                f"or shorter texts in one expression."
            )

    @classmethod
    def idle(cls) -> Self:
        """Give the automaton that remembers nothing."""
        none = torch.zeros(0, dtype=torch.int32)
        return cls(none, none, torch.zeros(1, 1, dtype=torch.int32))

    @classmethod
    def from_rows(cls, rows: Tensor, owner: Tensor) -> Self:
        """Make one from rows of where each state leads, (C, Q), and which is each token's: (V,).

        The row that most tokens have becomes class 0, which is not stored.
        """
        order = torch.bincount(owner, minlength=len(rows)).argsort(descending=True, stable=True)
        classes = _inverse(order)[owner]
        tokens = classes.nonzero()[:, 0]
        return cls(tokens.int(), classes[tokens].int(), rows[order].T.int().contiguous())

    @property
    def num_states(self) -> int:
        """Q."""
        return self.moves.shape[0]

    @cached_property
    def is_idle(self) -> bool:
        """Whether it never moves."""
        return self.num_states == 1

    def class_of(self, tokens: Tensor) -> Tensor:
        """Give the classes of tokens: (...) ids -> (...)."""
        if not len(self.tokens):
            return torch.zeros_like(tokens)
        place, found = lookup(self.tokens, tokens)
        return torch.where(found, self.classes[place].to(tokens.dtype), 0)

    def after(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Move: (...) states, (...) ids -> (...) states."""
        return self.moves[states.long(), self.class_of(tokens).long()].to(states.dtype)

    def resting(self, tokens: Sequence[int]) -> Self:
        """Give the same, but that these tokens move it nowhere: ends of texts."""
        if self.is_idle or not tokens:
            return self
        given = torch.tensor(sorted(set(tokens)), dtype=torch.int32)
        kept = ~torch.isin(self.tokens, given)
        every = torch.cat([self.tokens[kept], given])
        rest = torch.full_like(given, self.moves.shape[1])
        order = every.argsort()
        stay = torch.arange(self.num_states, dtype=torch.int32)[:, None]
        classes = torch.cat([self.classes[kept], rest])[order]
        return type(self)(every[order], classes, torch.cat([self.moves, stay], 1))

    def beside(self, other: Self) -> "Pair":
        """Run both at once: the states that both together can be in."""
        tokens = torch.unique(torch.cat([self.tokens, other.tokens]))
        pairs = torch.stack([self.class_of(tokens), other.class_of(tokens)], 1)
        pairs = torch.cat([torch.zeros(1, 2, dtype=pairs.dtype), pairs])  # class 0: of neither
        kinds, owner = torch.unique(pairs, dim=0, return_inverse=True)
        left, right = self.moves[:, kinds[:, 0].long()], other.moves[:, kinds[:, 1].long()]
        met = {(0, 0): 0}
        moves: list[list[int]] = []
        for a, b in (queue := [(0, 0)]):  # grows while it is read
            row = []
            for pair in zip(left[a].tolist(), right[b].tolist(), strict=True):
                if pair not in met:
                    met[pair] = len(met)
                    queue.append(pair)
                row.append(met[pair])
            moves.append(row)
            if len(met) > MOST_STATES:
                break  # refused below
        whole = torch.tensor(moves + [[0] * len(kinds)] * (len(met) - len(moves)))
        joined = type(self)(tokens.int(), owner[1:].int(), whole.int())
        states = torch.tensor(list(met))
        return Pair(joined, states[:, 0], states[:, 1])

    def merged(self, outputs: Tensor) -> "Merged":
        """Give the smallest automaton with the same outputs, (n, Q), wherever it may come."""
        if self.is_idle:
            return Merged(self, torch.zeros(1, dtype=torch.long))
        _, block = torch.unique(outputs, dim=1, return_inverse=True)
        count = 0
        while (found := int(block.max()) + 1) > count:  # Moore: split what moves apart
            count = found
            apart = torch.cat([block[:, None], block[self.moves.long()]], 1)
            _, block = torch.unique(apart, dim=0, return_inverse=True)
        met = {int(block[0]): 0}  # of each that can be reached, a state that is like it
        for state in (queue := [0]):
            for target in self.moves[state].tolist():
                if int(block[target]) not in met:
                    met[int(block[target])] = target
                    queue.append(target)
        if len(met) == 1:
            return Merged(type(self).idle(), torch.zeros(1, dtype=torch.long))
        first = torch.tensor(list(met.values()))
        place = torch.zeros(count, dtype=torch.long)
        place[torch.tensor(list(met))] = torch.arange(len(met))
        return Merged(self._with_fewer_classes(place[block[self.moves[first].long()]]), first)

    def _with_fewer_classes(self, moves: Tensor) -> Self:
        """Put classes together that move alike; class 0 stays the first."""
        kinds, owner = torch.unique(moves, dim=1, return_inverse=True)
        order = torch.arange(kinds.shape[1])
        order[0], order[owner[0]] = int(owner[0]), 0  # swap
        classes = _inverse(order)[owner][self.classes.long()]
        own = classes > 0
        return type(self)(self.tokens[own], classes[own].int(), kinds[:, order].int())

    def reading_below(self, vocab_size: int) -> Self:
        """Give the same, of a vocabulary that ends there."""
        kept = self.tokens < vocab_size
        return type(self)(self.tokens[kept], self.classes[kept], self.moves)

    def fewest(self, wanted: Tensor, vocab_size: int) -> Tensor:
        """Count the tokens it takes at least from each state to one that is wanted: (Q,).

        What cannot be reached is 2^31 - 1 away. Classes that have no token take nobody anywhere.
        """
        never = torch.iinfo(torch.int32).max
        used = torch.unique(self.classes).long()
        if len(self.tokens) < vocab_size:
            used = torch.cat([torch.zeros(1, dtype=torch.long), used])
        moves = self.moves[:, used].long()
        fewest = torch.where(wanted, 0, never)
        for _ in range(self.num_states if len(used) else 0):
            step = fewest[moves].min(1).values
            shorter = torch.minimum(fewest, torch.where(step < never, step + 1, never))
            if torch.equal(shorter, fewest):
                break
            fewest = shorter
        return fewest


class Pair(NamedTuple):
    """Two automata as one, and the states of each that its states stand for."""

    automaton: Automaton
    left: Tensor  # (Q,)
    right: Tensor  # (Q,)


class Merged(NamedTuple):
    """A smaller automaton, and of each of its states one that it was before."""

    automaton: Automaton
    first: Tensor  # (Q,)


def _inverse(order: Tensor) -> Tensor:
    """Give where each number stands in a permutation: (n,) -> (n,)."""
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return place
