"""The automata of markers as rows of shared tensors."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from foretrace.attribute.automaton import DFA
from foretrace.attribute.substring import substring_dfa
from foretrace.steering.slab import Slab
from foretrace.steering.window import Marker


class MarkerEntry(NamedTuple):
    """Where the pool has the automaton of a marker."""

    classes: int
    """The row with the class of every token."""
    transitions: int
    """The first of Q * C transitions."""
    num_classes: int
    found: int
    """The state in which the marker was found; -1 if there is no marker."""


class MarkerPool:
    """The automata of all markers that requests have used. They are few and small, and stay.

    Attributes:
        classes: Token classes, (rows, tokens). Row 0 is zero.
        transitions: The next state for every state and class, (entries,). Entry 0 is zero.
    """

    def __init__(self, device: torch.device) -> None:
        """Create a pool that has the entry for no marker."""
        self.device = device
        self.classes = Slab((1,), torch.int16, device)
        self.transitions = Slab((), torch.long, device)
        self.classes.write(torch.zeros(1, 1))
        self.transitions.write(torch.zeros(1))
        self._entries: dict[Marker | None, MarkerEntry] = {None: MarkerEntry(0, 0, 1, -1)}
        self._automata: dict[Marker, DFA] = {}

    def add(self, marker: Marker | None) -> MarkerEntry:
        """Copy the automaton of a marker into the pool, unless it is there."""
        if marker not in self._entries:
            assert marker is not None
            self._entries[marker] = self._copy(marker)
        return self._entries[marker]

    def state_after(self, marker: Marker, tokens: Sequence[int]) -> int:
        """Return the state of a marker's automaton after tokens, on the host."""
        self.add(marker)
        dfa, state = self._automata[marker], torch.zeros(1, dtype=torch.long)
        for token in tokens:
            state = dfa.step(state, torch.tensor([token])).long()
        return int(state)

    def _copy(self, marker: Marker) -> MarkerEntry:
        dfa, found = substring_dfa([marker.text], marker.token_bytes)
        self._automata[marker] = dfa
        tokens = len(marker.token_bytes)
        if self.classes.rows.shape[1] < tokens:  # the first marker: now the tokenizer is known
            self.classes = Slab((tokens,), torch.int16, self.device)
            self.classes.write(torch.zeros(1, tokens))
        classes = torch.zeros(1, tokens, dtype=torch.int16)
        classes[0, dfa.tokens.long()] = dfa.classes.short()
        states = found.nonzero()[:, 0].tolist()
        return MarkerEntry(
            self.classes.write(classes),
            self.transitions.write(dfa.transitions.flatten()),
            dfa.transitions.shape[1],
            states[0] if states else -1,  # no text of these tokens has the marker
        )
