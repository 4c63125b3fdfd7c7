"""A weighted automaton as tensors on the HMM's device, for steering."""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from foretrace.attribute.automaton import WeightedAutomaton
from foretrace.attribute.token_ids import find_sorted
from foretrace.hmm import HMM
from foretrace.hmm.emission import EmissionSubset


class DeviceAutomaton(NamedTuple):
    """Transition tables of an automaton. Tokens that are not in `tokens` are of class 0."""

    tokens: Tensor  # (M,) increasing
    classes: Tensor  # (M,)
    transitions: Tensor  # (Q, C)
    targets: Tensor  # (Q, D): distinct successors of each state; the first is that of class 0
    target_index: Tensor  # (Q, C): the column of `targets` that each class leads to
    min_tokens: Tensor  # (Q,): fewest tokens to a state with a final weight above 0
    emission: EmissionSubset  # the HMM's emission of `tokens`

    @classmethod
    def from_weighted(cls, weighted: WeightedAutomaton, hmm: HMM) -> Self:
        """Copy an automaton to the HMM's device; end-of-text tokens must not move it."""
        automaton, device = weighted.dfa, hmm.device
        transitions = automaton.transitions.long()
        rows = transitions.tolist()
        distinct = [list(dict.fromkeys(row)) for row in rows]  # class 0 comes first
        width = max(map(len, distinct))
        target_index = [
            [targets.index(target) for target in row]
            for targets, row in zip(distinct, rows, strict=True)
        ]
        padded = [targets + targets[:1] * (width - len(targets)) for targets in distinct]
        tokens = automaton.tokens.to(device, torch.long)
        return cls(
            tokens,
            automaton.classes.to(device, torch.long),
            transitions.to(device),
            torch.tensor(padded, device=device),
            torch.tensor(target_index, device=device),
            weighted.min_tokens(hmm.vocab_size).to(device),
            hmm.emission.subset(tokens),
        )

    @property
    def nbytes(self) -> int:
        """Return the size in bytes."""
        return self.emission.nbytes + sum(tensor.nbytes for tensor in self[:-1])

    def run(self, tokens: Tensor) -> Tensor:
        """Return the state after a sequence, from the initial state: (T,) ids -> (1,)."""
        state = torch.zeros(1, dtype=torch.long, device=self.transitions.device)
        for position in range(len(tokens)):
            state = self.step(state, tokens[position : position + 1])
        return state

    def step(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Return the states after one token each: (...) states, (...) ids -> (...)."""
        index, is_listed = find_sorted(self.tokens, tokens)
        return self.transitions[states, torch.where(is_listed, self.classes[index], 0)]
