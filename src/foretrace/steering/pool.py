"""Tables, token weights and automata of the goals in use, as rows of shared tensors on a device.

A step gathers from these by indices that differ from row to row. The number of operations then does
not depend on the number of goals. The pool is the only copy on the device.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from foretrace.attribute.automaton import WeightedAutomaton
from foretrace.context import Probe
from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM
from foretrace.hmm.emission import EmissionSubset
from foretrace.lookahead.lookahead import Lookahead
from foretrace.steering.context import ContextPool
from foretrace.steering.goal import CompiledGoal, PooledAutomaton, PooledLookahead
from foretrace.steering.markers import CompiledMarker, PooledMarker, Window
from foretrace.steering.slab import Slab

NO_MARKER = PooledMarker(None, "", 0, 0, 1, 1, -1)


def _keys(goal: CompiledGoal) -> list[str]:
    """Return the keys of a goal's parts."""
    markers = (goal.window.after, goal.window.until)
    keys = [factor.key for factor in goal.factors]
    return [*keys, *(one.key for one in markers if not (one is None or isinstance(one, int)))]


@dataclass
class _Entry:
    """Something in the pool, and how many sequences use it."""

    item: PooledLookahead | PooledMarker
    tokens: Tensor | None = None
    """The tokens that an automaton lists, (M,), increasing."""
    emission: EmissionSubset | None = None
    """The HMM's emission of these tokens."""
    users: int = 0


class TablePool:
    """The tensors that the steps of a batch gather from.

    A sequence acquires its goal when it starts, and releases it when it ends. What no sequence uses
    stays in the pool until its room is needed: the least recently used goes first.

    Attributes:
        hmm: The HMM of all goals.
        memory: How many bytes the pool may have; None for no limit. Running sequences may exceed
            it: their goals are never removed.
        tables: Backward tables, (rows, h).
        log_scales: Their scales, (rows,) float64.
        log_missing: How probable it is that required text still comes, (rows,) float64.
        weights: Token weights in the form of the goal's kind, (rows, V).
        first_only: Rewards that count once, times -1: (rows, V + 1). Row 0 and the last column are
            zero.
        classes: Token classes of automata, (rows, V).
        transitions: The next state for every state and class of an automaton, (entries,).
        target_index: The index of that state among the targets, (entries,).
        targets: The distinct next states of every state; class 0 leads to the first, (entries,).
        min_tokens: Fewest tokens from each automaton state to one that satisfies it, (states,).
        marker_classes: Token classes of markers, (rows, tokens). Row 0 is zero.
        marker_transitions: The next state for every state and class of a marker, (entries,).
        context: The probe of the LM, and the goals' context rewards; None before the first of them.
    """

    def __init__(self, hmm: HMM, memory: int | None = None) -> None:
        """Create an empty pool for the goals of an HMM."""
        self.hmm, self.memory = hmm, memory
        self._clear()

    def _clear(self) -> None:
        hmm = self.hmm
        device, dtype, vocab = hmm.device, hmm.initial.dtype, (hmm.vocab_size,)
        self.tables = Slab((hmm.num_states,), dtype, device)
        self.log_scales = Slab((), torch.float64, device)
        self.log_missing = Slab((), torch.float64, device)
        self.weights = Slab(vocab, dtype, device)
        self.first_only = Slab((hmm.vocab_size + 1,), dtype, device)
        self.classes = Slab(vocab, torch.int16, device)
        self.transitions = Slab((), torch.long, device)
        self.target_index = Slab((), torch.long, device)
        self.targets = Slab((), torch.long, device)
        self.min_tokens = Slab((), torch.long, device)
        self.marker_classes = Slab((1,), torch.int16, device)
        self.marker_transitions = Slab((), torch.long, device)
        self.first_only.write(torch.zeros(1, hmm.vocab_size + 1))
        self.marker_classes.write(torch.zeros(1, 1))
        self.marker_transitions.write(torch.zeros(1))
        self.context: ContextPool | None = None
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # least recently used first
        self._subset_bytes = 0

    @property
    def nbytes(self) -> int:
        """The size in bytes, with the rows that are not in use."""
        slabs = (value for value in vars(self).values() if isinstance(value, Slab))
        context = 0 if self.context is None else self.context.nbytes
        return self._subset_bytes + context + sum(slab.nbytes for slab in slabs)

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def find(self, key: str) -> PooledLookahead | PooledMarker | None:
        """Return what the pool has under a key, and mark it as used now."""
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key].item

    def acquire(self, goal: CompiledGoal) -> CompiledGoal:
        """Copy a goal into the pool, unless it is there, and keep it until its release.

        Args:
            goal: The goal. A part that the pool has already may be given by what `find` returned.

        Returns:
            The same goal. Its parts say where they are in the pool, and hold no tables.

        Raises:
            InvalidInputError: If a marker has another tokenizer, the probe belongs to another LM
                than the probe in use, or a part that `find` returned is not in the pool any more.
        """
        if goal.has_context:
            self._use(goal.probe)
        after, until = goal.window.after, goal.window.until
        taken: list[str] = []
        try:
            factors = tuple(
                factor._replace(lookahead=self._take(factor.key, factor.lookahead, taken))
                for factor in goal.factors
            )
            if after is not None:
                after = self._take(after.key, after, taken)
            if until is not None and not isinstance(until, int):
                until = self._take(until.key, until, taken)
        except BaseException:
            self._release(taken)
            raise
        return replace(goal, factors=factors, window=Window(after, until))

    def _use(self, probe: Probe | None) -> None:
        if probe is None:
            raise InvalidInputError("A goal with a context reward needs the probe of its LM.")
        if self.context is None:
            self.context = ContextPool(probe, self.hmm)
        self.context.probe.require_head(probe.config.fingerprint)

    def release(self, goal: CompiledGoal) -> None:
        """Let go of a goal that `acquire` returned. It stays until its room is needed."""
        self._release(_keys(goal))

    @contextmanager
    def pinned(self, goals: Sequence[CompiledGoal]) -> Iterator[None]:
        """Keep what the pool has of goals, so that acquiring one does not remove another's."""
        keys = [key for goal in goals for key in _keys(goal) if key in self._entries]
        for key in keys:
            self._entries[key].users += 1
        try:
            yield
        finally:
            self._release(keys)

    def listed(self, key: str) -> tuple[Tensor, EmissionSubset]:
        """Return the tokens that a goal's automaton lists, (M,), and their emission."""
        entry = self._entries[key]
        assert entry.tokens is not None
        assert entry.emission is not None
        return entry.tokens, entry.emission

    def _take(self, key: str, part: Any, taken: list[str]) -> Any:
        """Return the pooled form of a lookahead or marker, with one more user."""
        entry = self._entries.get(key)
        if entry is None:
            if isinstance(part, Lookahead):
                entry = self._copy_lookahead(part)
            elif isinstance(part, CompiledMarker):
                entry = self._copy_marker(part)
            else:
                raise InvalidInputError(
                    "The tables of this goal were removed from the pool. Load them again."
                )
            self._entries[key] = entry
        self._entries.move_to_end(key)
        entry.users += 1
        taken.append(key)
        return entry.item

    def _release(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._entries[key].users -= 1
        if self.memory is None or self.nbytes <= self.memory:
            return
        if not any(entry.users for entry in self._entries.values()):
            self._clear()  # running sequences have exceeded the budget, and have ended

    def _make_room(self, *needs: tuple[Slab, int]) -> None:
        """Remove what no sequence uses until so many rows of slabs fit into the budget."""
        if self.memory is None:
            return
        unused = [key for key, entry in self._entries.items() if not entry.users]
        for key in unused:
            growth = sum(slab.growth(count) for slab, count in needs)
            if not growth or self.nbytes + growth <= self.memory:
                return
            self._remove(key)

    def _copy_lookahead(self, lookahead: Lookahead) -> _Entry:
        values, log_scales, log_missing = lookahead.tables
        reward, context = lookahead.attribute.context, self.context
        rows = log_scales.numel()
        needs = [(slab, rows) for slab in (self.tables, self.log_scales, self.log_missing)]
        needs.append((self.weights, len(lookahead.terms)))
        if reward is not None:
            assert context is not None  # the goal has a probe
            needs += [(context.readers, len(reward)), (context.writers, len(reward))]
        self._make_room(*needs)
        tables = self.tables.write(values.flatten(0, 2))
        scales = self.log_scales.write(log_scales.flatten())
        missing = self.log_missing.write(log_missing.flatten())
        assert tables == scales == missing  # these slabs have the same history
        weights = self.weights.write(lookahead.token_weights())
        rewards, automaton = lookahead.first_only, lookahead.terms.automaton
        first_only = 0
        if rewards is not None:
            first_only = self.first_only.write(torch.nn.functional.pad(-rewards, (0, 1))[None])
        pooled = PooledLookahead(
            tables,
            weights,
            first_only,
            None if automaton is None else self._copy_automaton(automaton),
            lookahead.kind,
            lookahead.horizon,
            tuple(lookahead.terms.coefficients.tolist()),
            lookahead.terms.num_states,
            lookahead.min_tokens,
            lookahead.requires_text,
            0 if reward is None or context is None else context.write(reward),
            0 if reward is None else len(reward),
            automaton,
        )
        if automaton is None:
            return _Entry(pooled)
        tokens = automaton.dfa.tokens.to(self.hmm.device, torch.long)
        emission = self.hmm.emission.subset(tokens)
        self._subset_bytes += emission.nbytes
        return _Entry(pooled, tokens, emission)

    def _copy_automaton(self, weighted: WeightedAutomaton) -> PooledAutomaton:
        """Copy an automaton; end-of-text tokens must not move it."""
        dfa, vocab = weighted.dfa, self.hmm.vocab_size
        classes = torch.zeros(1, vocab, dtype=torch.int16)
        classes[0, dfa.tokens.long()] = dfa.classes.short()
        rows = dfa.transitions.tolist()
        distinct = [list(dict.fromkeys(row)) for row in rows]  # class 0 comes first
        width = max(map(len, distinct))
        target_index = [
            [targets.index(target) for target in row]
            for targets, row in zip(distinct, rows, strict=True)
        ]
        padded = [targets + targets[:1] * (width - len(targets)) for targets in distinct]
        transitions = self.transitions.write(dfa.transitions.flatten())
        indices = self.target_index.write(torch.tensor(target_index).flatten())
        assert indices == transitions  # both slabs have the same history
        num_states, num_classes = dfa.transitions.shape
        return PooledAutomaton(
            self.classes.write(classes),
            transitions,
            self.min_tokens.write(weighted.min_tokens(vocab)),
            self.targets.write(torch.tensor(padded).flatten()),
            num_classes,
            num_states,
            width,
        )

    def _copy_marker(self, compiled: CompiledMarker) -> _Entry:
        marker, dfa, found = compiled
        tokens = len(marker.token_bytes)
        if len(self.marker_classes.data) == 1:  # the first marker: now the tokenizer is known
            self.marker_classes = Slab((tokens,), torch.int16, self.hmm.device)
            self.marker_classes.write(torch.zeros(1, tokens))
        if self.marker_classes.data.shape[1] != tokens:
            raise InvalidInputError(
                f"The tokenizer of the marker {marker.text!r} has {tokens} tokens, and another "
                f"marker's tokenizer has {self.marker_classes.data.shape[1]}. Make all markers "
                f"with the tokenizer of the language model."
            )
        self._make_room((self.marker_classes, 1))
        classes = torch.zeros(1, tokens, dtype=torch.int16)
        classes[0, dfa.tokens.long()] = dfa.classes.short()
        return _Entry(
            PooledMarker(
                marker,
                compiled.key,
                self.marker_classes.write(classes),
                self.marker_transitions.write(dfa.transitions.flatten()),
                dfa.transitions.shape[1],
                dfa.transitions.numel(),
                found,
            )
        )

    def _remove(self, key: str) -> None:
        entry = self._entries.pop(key)
        if entry.emission is not None:
            self._subset_bytes -= entry.emission.nbytes
        item = entry.item
        if isinstance(item, PooledMarker):
            self.marker_classes.free(item.classes, 1)
            self.marker_transitions.free(item.transitions, item.num_transitions)
            return
        self.tables.free(item.tables, item.num_tables)
        self.log_scales.free(item.tables, item.num_tables)
        self.log_missing.free(item.tables, item.num_tables)
        self.weights.free(item.weights, item.num_terms)
        if item.first_only:
            self.first_only.free(item.first_only, 1)
        if item.rank and self.context is not None:
            self.context.free(item.context, item.rank)
        if item.automaton is not None:
            self._remove_automaton(item.automaton)

    def _remove_automaton(self, automaton: PooledAutomaton) -> None:
        self.classes.free(automaton.classes, 1)
        for slab in (self.transitions, self.target_index):
            slab.free(automaton.transitions, automaton.num_states * automaton.num_classes)
        self.targets.free(automaton.targets, automaton.num_states * automaton.num_targets)
        self.min_tokens.free(automaton.states, automaton.num_states)
