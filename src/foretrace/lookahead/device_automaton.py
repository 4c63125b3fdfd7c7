"""An automaton beside an HMM: what steering has to know of it, on the device."""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from foretrace.attribute.lookup import lookup
from foretrace.attribute.memory import Memory
from foretrace.hmm import HMM
from foretrace.hmm.emission import Part


class Reading(NamedTuple):
    """Where next tokens lead. All but `tokens` are of class 0."""

    tokens: Tensor  # (M,) rising
    classes: Tensor  # (M,)
    moves: Tensor  # (Q, C)
    targets: Tensor  # (Q, D): states that next tokens lead to; the first is that of class 0
    column: Tensor  # (Q, C): which of them each class leads to
    fewest: Tensor  # (Q,): tokens that it takes at least to an end that is worth something
    emission: Part  # of `tokens`

    @classmethod
    def of(cls, memory: Memory, hmm: HMM) -> Self:
        """Prepare an automaton that rests at ends of texts."""
        automaton, device = memory.automaton, hmm.device
        moves = automaton.moves.long()
        rows = moves.tolist()
        found = [list(dict.fromkeys(row)) for row in rows]  # class 0 comes first
        width = max(map(len, found))
        column = [[own.index(to) for to in row] for own, row in zip(found, rows, strict=True)]
        targets = [own + own[:1] * (width - len(own)) for own in found]
        tokens = automaton.tokens.to(device, torch.long)
        return cls(
            tokens,
            automaton.classes.to(device, torch.long),
            moves.to(device),
            torch.tensor(targets, device=device),
            torch.tensor(column, device=device),
            memory.fewest(hmm.vocab_size).to(device),
            hmm.emission.part(tokens),
        )

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self.emission.nbytes + sum(part.nbytes for part in self[:-1])

    def read(self, tokens: Tensor) -> Tensor:
        """Read a text from its beginning: (T,) ids -> (1,)."""
        state = torch.zeros(1, dtype=torch.long, device=self.moves.device)
        for place in range(len(tokens)):
            state = self.after(state, tokens[place : place + 1])
        return state

    def after(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Move: (...) states, (...) ids -> (...)."""
        place, found = lookup(self.tokens, tokens)
        return self.moves[states, torch.where(found, self.classes[place], 0)]
