"""Tables, token weights and automata of all lookaheads in use, as rows of shared tensors.

A step gathers from these by indices that differ from row to row. The number of operations then does
not depend on the number of lookaheads.
"""

from dataclasses import dataclass
from weakref import WeakKeyDictionary, finalize

import torch

from foretrace.hmm import HMM
from foretrace.lookahead.device_automaton import DeviceAutomaton
from foretrace.lookahead.lookahead import Lookahead
from foretrace.steering.marker_pool import MarkerPool
from foretrace.steering.slab import Slab


@dataclass(frozen=True)
class AutomatonEntry:
    """Where the pool has an automaton."""

    classes: int
    """The row with the class of every token."""
    transitions: int
    """The first of Q * C transitions."""
    states: int
    """The first of Q states."""
    targets: int
    """The first of Q * D distinct targets."""
    num_classes: int  # C
    num_states: int  # Q
    num_targets: int  # D


@dataclass(frozen=True)
class LookaheadEntry:
    """Where the pool has a lookahead."""

    tables: int
    """The first of (horizon + 1) * K * Q rows."""
    weights: int
    """The first of K rows, one for each term."""
    once: int
    """The row of rewards that count once; 0 if there are none."""
    automaton: AutomatonEntry | None


class TablePool:
    """The tensors that the steps of all batches gather from.

    A lookahead is copied when a request first uses it, and removed when it is garbage-collected.

    Attributes:
        tables: Backward tables, (rows, h).
        log_scales: Their scales, (rows,) float64.
        weights: Token weights in the form of the lookahead's kind, (rows, V).
        once: Rewards that count once, times -1: (rows, V + 1). Row 0 and the last column are zero.
        classes: Token classes of automata, (rows, V).
        transitions: The next state for every state and class of an automaton, (entries,).
        target_index: The position of that state among the targets, (entries,).
        targets: The distinct next states of every state; the first is that of class 0, (entries,).
        min_tokens: Fewest tokens from each automaton state to one that satisfies it, (states,).
        markers: The automata of markers.
    """

    def __init__(self, hmm: HMM) -> None:
        """Create an empty pool for the lookaheads of an HMM."""
        device, dtype, vocab = hmm.device, hmm.initial.dtype, (hmm.vocab_size,)
        self.hmm = hmm
        self.tables = Slab((hmm.num_states,), dtype, device)
        self.log_scales = Slab((), torch.float64, device)
        self.weights = Slab(vocab, dtype, device)
        self.once = Slab((hmm.vocab_size + 1,), dtype, device)
        self.classes = Slab(vocab, torch.int16, device)
        self.transitions = Slab((), torch.long, device)
        self.target_index = Slab((), torch.long, device)
        self.targets = Slab((), torch.long, device)
        self.min_tokens = Slab((), torch.long, device)
        self.once.write(torch.zeros(1, hmm.vocab_size + 1))
        self._entries: WeakKeyDictionary[Lookahead, LookaheadEntry] = WeakKeyDictionary()
        self.markers = MarkerPool(device)

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        slabs = (self.tables, self.log_scales, self.weights, self.once)
        automata = (self.classes, self.transitions, self.target_index, self.targets)
        return sum(slab.nbytes for slab in (*slabs, *automata, self.min_tokens))

    def add(self, lookahead: Lookahead) -> LookaheadEntry:
        """Copy a lookahead into the pool, unless it is there, and return where it is."""
        entry = self._entries.get(lookahead)
        if entry is None:
            entry = self._copy(lookahead)
            self._entries[lookahead] = entry
            finalize(lookahead, self._remove, entry, *_sizes(lookahead)).atexit = False
        return entry

    def _copy(self, lookahead: Lookahead) -> LookaheadEntry:
        values, log_scales = lookahead.tables
        tables = self.tables.write(values.flatten(0, 2))
        scales = self.log_scales.write(log_scales.flatten())
        assert scales == tables  # both slabs have the same history
        once, automaton = lookahead.once_rewards, lookahead.automaton
        return LookaheadEntry(
            tables,
            self.weights.write(lookahead.token_weights),
            0 if once is None else self.once.write(torch.nn.functional.pad(-once, (0, 1))[None]),
            None if automaton is None else self._copy_automaton(automaton),
        )

    def _copy_automaton(self, automaton: DeviceAutomaton) -> AutomatonEntry:
        classes = torch.zeros(1, self.hmm.vocab_size, dtype=torch.int16)
        classes = classes.to(automaton.tokens.device)
        classes[0, automaton.tokens] = automaton.classes.short()
        transitions = self.transitions.write(automaton.transitions.flatten())
        target_index = self.target_index.write(automaton.target_index.flatten())
        assert target_index == transitions  # both slabs have the same history
        num_states, num_classes = automaton.transitions.shape
        return AutomatonEntry(
            self.classes.write(classes),
            transitions,
            self.min_tokens.write(automaton.min_tokens),
            self.targets.write(automaton.targets.flatten()),
            num_classes,
            num_states,
            automaton.targets.shape[1],
        )

    def _remove(self, entry: LookaheadEntry, num_tables: int, num_terms: int) -> None:
        self.tables.free(entry.tables, num_tables)
        self.log_scales.free(entry.tables, num_tables)
        self.weights.free(entry.weights, num_terms)
        if entry.once:
            self.once.free(entry.once, 1)
        if entry.automaton is not None:
            self._remove_automaton(entry.automaton)

    def _remove_automaton(self, entry: AutomatonEntry) -> None:
        self.classes.free(entry.classes, 1)
        for slab in (self.transitions, self.target_index):
            slab.free(entry.transitions, entry.num_states * entry.num_classes)
        self.targets.free(entry.targets, entry.num_states * entry.num_targets)
        self.min_tokens.free(entry.states, entry.num_states)


def _sizes(lookahead: Lookahead) -> tuple[int, int]:
    """Return the numbers of rows of tables and of token weights."""
    return int(lookahead.tables.log_scales.numel()), len(lookahead.token_weights)
