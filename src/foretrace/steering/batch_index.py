"""The index of a batch: for every row, where the pool has the tables of its goal.

An index is built on the host and copied to the device when rows come, go or change places, and not
at every step. What changes at every step is in `SlotState`, on the device.

A *column* is one term of one goal of one row. A goal here is one factor of a row's compiled goal.
Goals are sorted by kind, and columns by goal, so that each kind is a slice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isfinite, log
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretrace.hmm.emission import EmissionSubset
from foretrace.lookahead.kernels import EapKind, GoalGroup
from foretrace.steering.context import ContextIndex
from foretrace.steering.goal import CompiledGoal, Factor, PooledLookahead, Request
from foretrace.steering.markers import PooledMarker
from foretrace.steering.pool import NO_MARKER, TablePool
from foretrace.steering.state import NEVER


@dataclass(frozen=True)
class Kernels:
    """How a step is computed. All choices give the same result; the hardware decides."""

    block_elements: int
    """Probabilities of a block of the vocabulary."""
    row_elements: int | None
    """Logits of a block of rows; None to process all rows at once."""
    corrects_together: bool
    """Whether all automata are corrected in one pass over the tokens that any of them lists. Else,
    each automaton has a pass over its own tokens, which is less arithmetic."""
    limits_all_rows: bool
    """Whether the limit of the price is applied to all rows, or to those that exceed it, which
    reads a value from the device."""
    transposes_by_product: bool
    """Whether few rows are transposed by a product with the identity matrix."""
    solves_states: bool
    """Whether the hidden states of rows in which logits were changed are solved from the others,
    which reads values from the device."""

    @classmethod
    def for_device(cls, device: torch.device) -> "Kernels":
        """Return the fastest choices for a device: blocks that fit a CPU's caches, or few waits."""
        if device.type == "cpu":
            return cls(1 << 19, 1 << 18, False, False, True, True)
        return cls(1 << 27, None, True, True, False, False)


class IndexedRow(NamedTuple):
    """A row to steer: its index in the logits, its slot, and its request, whose goal is pooled."""

    row: int
    slot: int
    request: Request


class RowIndex(NamedTuple):
    """Integers of every row: (n,) int64 each."""

    logits: Tensor  # index in the logits
    slots: Tensor
    limit: Tensor  # tokens to generate at most
    horizon: Tensor  # tokens to look ahead at most
    min_tokens: Tensor  # fewest tokens that satisfy the constraint


class Columns(NamedTuple):
    """Integers of every column: (C,) int64 each."""

    rows: Tensor  # index in `RowIndex`
    goals: Tensor
    tables: Tensor  # row of the pool's tables for no token to come, in automaton state 0
    table_stride: Tensor  # rows per token to come
    table_horizon: Tensor
    weights: Tensor  # row of the pool's token weights
    past: Tensor  # index in the flattened pasts of all slots
    constrained: Tensor  # 1 if the goal has an automaton, else 0


class NeutralEnds(NamedTuple):
    """End-of-text tokens of every row, which may keep their probability."""

    tokens: Tensor  # (n, E); 0 for none
    is_copy: Tensor  # (n, E) bool: whether the token is in an earlier column, too
    is_neutral: Tensor  # (n, 1) bool


class AutomatonRows(NamedTuple):
    """Integers of every row whose goal has an automaton: (A,) int64 each."""

    rows: Tensor  # index in `RowIndex`
    goals: Tensor
    classes: Tensor  # row of the pool's token classes
    transitions: Tensor  # first of the automaton's transitions in the pool
    states: Tensor  # first of its states
    targets: Tensor  # first of its distinct targets
    num_classes: Tensor
    num_targets: Tensor


@dataclass(frozen=True, eq=False)
class AutomatonIndex:
    """Rows with an automaton whose factors are corrected together."""

    rows: AutomatonRows
    columns: Tensor  # (C,) columns of the automata's goals: index in `Columns`
    column_rows: Tensor  # (C,) index in `rows`
    column_weights: Tensor  # (C, 1) row of the pool's token weights
    logarithmic: Tensor  # (C, 1) bool: the weights are logarithms
    max_targets: int
    tokens: Tensor  # (U,) all tokens that one of the automata lists, increasing
    emission: EmissionSubset  # of these tokens


class MarkerIndex(NamedTuple):
    """Where the automata of markers are, and the lengths of windows: (n,) int64 each.

    `found` is -1 if there is no such marker, and `length` if there is no such length.
    """

    begin_classes: Tensor
    begin_transitions: Tensor
    begin_num_classes: Tensor
    begin_found: Tensor
    end_classes: Tensor
    end_transitions: Tensor
    end_num_classes: Tensor
    end_found: Tensor
    length: Tensor


@dataclass(frozen=True, eq=False)
class BatchIndex:
    """The rows, goals and columns of a batch, on the device: n, G and C of them."""

    rows: RowIndex
    max_price: Tensor | None  # (n, 1) float32: nats that a step may cost
    required_power: Tensor | None  # (n,) float64: of the probability of required text, less 1
    stop_ids: Tensor | None  # (n, E) tokens that end a text, padded with the first; -1 for none
    neutral_ends: NeutralEnds | None
    first_only: Tensor | None  # (n, 1): row of the pool's rewards that count once
    columns: Columns
    coefficients: Tensor  # (C,) float64
    log_coefficients: Tensor  # (C,) float64, of single terms; 0 for terms of sums
    goal_rows: Tensor  # (G,) index in `RowIndex`
    scale: Tensor  # (G,) float64, of the transform
    shift: Tensor  # (G,) float64
    groups: tuple[GoalGroup, ...]
    markers: MarkerIndex | None
    automata: AutomatonRows | None
    corrections: tuple[AutomatonIndex, ...]
    context: ContextIndex | None
    one_goal_per_row: bool
    """Whether goal i is the only goal of row i: no index is needed then."""
    one_column_per_row: bool
    all_rows: bool
    """Whether the rows are all rows of the logits, in order."""
    has_windows: bool
    """Whether a row may be outside the window of its goal."""

    def __len__(self) -> int:
        return len(self.rows.slots)

    @property
    def has_transforms(self) -> bool:
        """Whether a goal has a transform."""
        return any(group.is_transformed for group in self.groups)


class _Goal(NamedTuple):
    """One factor of a row's goal."""

    row: int
    """The index of its row."""
    factor: Factor
    past: int
    """The index of its first term in the flattened pasts of all slots."""

    @property
    def pooled(self) -> PooledLookahead:
        """Where the pool has its tables."""
        assert isinstance(self.factor.lookahead, PooledLookahead)
        return self.factor.lookahead

    @property
    def group(self) -> tuple[EapKind, bool]:
        """Its kind, and whether it has a transform."""
        return self.pooled.kind, not self.factor.transform.is_identity


class Transfer:
    """Copies rows of numbers to a device, from pinned memory, without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        """Create a transfer to a device."""
        self.device = device

    def integers(self, rows: Sequence[Sequence[int]], width: int) -> Tensor:
        """Copy rows of `width` integers as columns: (width, rows) int64."""
        return self._copy(np.array(rows, dtype=np.int64).reshape(-1, width))

    def floats(self, rows: Sequence[Sequence[float]], width: int) -> Tensor:
        """Copy rows of `width` numbers as columns: (width, rows) float64."""
        return self._copy(np.array(rows, dtype=np.float64).reshape(-1, width))

    def _copy(self, rows: NDArray[np.int64] | NDArray[np.float64]) -> Tensor:
        columns = torch.from_numpy(np.ascontiguousarray(rows.T))
        if self.device.type == "cuda" and torch.cuda.is_available():
            columns = columns.pin_memory()
        return columns.to(self.device, non_blocking=True)


def to_device(values: Sequence[Any], device: torch.device) -> Tensor:
    """Copy numbers to a device. Unlike `torch.tensor(..., device=...)`, do not wait for it."""
    return torch.tensor(values).to(device, non_blocking=True)


def build_index(
    rows: Sequence[IndexedRow],
    pool: TablePool,
    kernels: Kernels,
    shape: tuple[int, int],
    num_terms: int,
) -> BatchIndex:
    """Build the index of the rows that are steered.

    Args:
        rows: The rows.
        pool: The pool that has their goals.
        kernels: How steps are computed.
        shape: The shape of the logits.
        num_terms: The number of terms that the state has room for, in every slot.

    Returns:
        The index, on the pool's device.
    """
    transfer = Transfer(pool.hmm.device)
    goals = _sorted_goals(rows, num_terms)
    columns = [column for index, goal in enumerate(goals) for column in _columns(index, goal)]
    stops = _padded_stops(rows, shape[1], transfer)
    row_integers = [_row_integers(row) for row in rows]
    transforms = [(goal.factor.transform.scale, goal.factor.transform.shift) for goal in goals]
    coefficients = transfer.floats([pair for goal in goals for pair in _coefficients(goal)], 2)
    scale, shift = transfer.floats(transforms, 2)
    automata = [_automaton_integers(index, goal) for index, goal in enumerate(goals)]
    constrained = [integers for integers in automata if integers is not None]
    in_order = list(range(len(rows)))
    return BatchIndex(
        rows=RowIndex(*transfer.integers(row_integers, len(RowIndex._fields))),
        max_price=_max_prices(rows, transfer),
        required_power=_required_powers(rows, transfer),
        stop_ids=stops,
        neutral_ends=_neutral_ends(rows, stops, transfer),
        first_only=_first_only(rows, transfer),
        columns=Columns(*transfer.integers(columns, len(Columns._fields))),
        coefficients=coefficients[0],
        log_coefficients=coefficients[1],
        goal_rows=transfer.integers([(goal.row,) for goal in goals], 1)[0],
        scale=scale,
        shift=shift,
        groups=_groups(goals),
        markers=_marker_index(rows, transfer),
        automata=_automaton_rows(constrained, transfer) if constrained else None,
        corrections=_corrections(goals, pool, kernels, transfer),
        context=_context_index(rows, transfer),
        one_goal_per_row=[goal.row for goal in goals] == in_order,
        one_column_per_row=[column[0] for column in columns] == in_order,
        all_rows=[row.row for row in rows] == list(range(shape[0])),
        has_windows=any(not _goal(row).window.is_whole for row in rows),
    )


def _goal(row: IndexedRow) -> CompiledGoal:
    assert row.request.goal is not None
    return row.request.goal


def _sorted_goals(rows: Sequence[IndexedRow], num_terms: int) -> list[_Goal]:
    """List the goals of all rows by kind, and within a kind in the order of the rows."""
    goals = []
    for index, row in enumerate(rows):
        past = row.slot * num_terms
        for factor in _goal(row).factors:
            goals.append(_Goal(index, factor, past))
            past += factor.lookahead.num_terms
    return sorted(goals, key=lambda goal: goal.group)


def _groups(goals: Sequence[_Goal]) -> tuple[GoalGroup, ...]:
    """Return the slices of the goals and columns of each kind that occurs."""
    groups: list[GoalGroup] = []
    goal = column = 0
    for key in dict.fromkeys(goal.group for goal in goals):
        members = [goal for goal in goals if goal.group == key]
        next_goal = goal + len(members)
        next_column = column + sum(goal.pooled.num_terms for goal in members)
        groups.append(GoalGroup(*key, slice(goal, next_goal), slice(column, next_column)))
        goal, column = next_goal, next_column
    return tuple(groups)


def _columns(index: int, goal: _Goal) -> list[tuple[int, ...]]:
    """Return the integers of a goal's columns, in the order of `Columns`."""
    pooled = goal.pooled
    return [
        (
            goal.row,
            index,
            pooled.tables + term * pooled.num_states,
            pooled.num_terms * pooled.num_states,
            pooled.horizon,
            pooled.weights + term,
            goal.past + term,
            int(pooled.has_constraint),
        )
        for term in range(pooled.num_terms)
    ]


def _coefficients(goal: _Goal) -> list[tuple[float, float]]:
    """Return the coefficients of a goal's terms, and their logarithms if there is one term."""
    is_single = goal.pooled.kind == EapKind.LOGARITHMIC
    return [(value, log(value) if is_single else 0.0) for value in goal.pooled.coefficients]


def _row_integers(row: IndexedRow) -> tuple[int, ...]:
    """Return the integers of a row, in the order of `RowIndex`."""
    request = row.request
    horizon = NEVER if request.horizon is None else request.horizon
    return row.row, row.slot, request.limit, horizon, _goal(row).min_tokens


def _padded_stops(rows: Sequence[IndexedRow], vocab_size: int, transfer: Transfer) -> Tensor | None:
    """Return the end tokens of every row, padded with its first, or with -1 if it has none: (n, E).

    Tokens outside the vocabulary cannot be generated, and are left out.
    """
    stops = [[token for token in row.request.stop_ids if 0 <= token < vocab_size] for row in rows]
    width = max(map(len, stops), default=0)
    if not width:
        return None
    padded = [[*ids, *[ids[0] if ids else -1] * (width - len(ids))] for ids in stops]
    return transfer.integers(padded, width).T


def _neutral_ends(
    rows: Sequence[IndexedRow], stops: Tensor | None, transfer: Transfer
) -> NeutralEnds | None:
    """Return the padded end tokens of every row, if they keep their probability in some row."""
    neutral = [_goal(row).neutral_end for row in rows]
    if stops is None or not any(neutral):
        return None
    is_neutral = transfer.integers([(int(flag),) for flag in neutral], 1).T.bool()
    same = stops.unsqueeze(2) == stops.unsqueeze(1)
    is_copy = same.tril(-1).any(2)
    return NeutralEnds(stops.clamp_min(0), is_copy, is_neutral & (stops[:, :1] >= 0))


def _required_powers(rows: Sequence[IndexedRow], transfer: Transfer) -> Tensor | None:
    """Return the power of each row, less 1; None if no row has one: (n,)."""
    powers = [row.request.required_power for row in rows]
    if all(power is None for power in powers):
        return None
    return transfer.floats([(0.0 if power is None else power - 1,) for power in powers], 1)[0]


def _max_prices(rows: Sequence[IndexedRow], transfer: Transfer) -> Tensor | None:
    """Return the limits of the price of every row, if there are any."""
    limits = [(_goal(row).max_price,) for row in rows]
    if not any(isfinite(limit) for (limit,) in limits):
        return None
    return transfer.floats(limits, 1).T.float()


def _first_only(rows: Sequence[IndexedRow], transfer: Transfer) -> Tensor | None:
    """Return where the pool has each row's rewards that count once, if there are any."""
    if not any(_goal(row).has_first_only for row in rows):
        return None
    entries = [
        (max(_Goal(0, factor, 0).pooled.first_only for factor in _goal(row).factors),)
        for row in rows
    ]
    return transfer.integers(entries, 1).T


def _context_index(rows: Sequence[IndexedRow], transfer: Transfer) -> ContextIndex | None:
    """Return where the pool has the components of the rows' context rewards, if there are any."""
    components = [
        [
            pooled.context + number
            for pooled in (_Goal(0, factor, 0).pooled for factor in _goal(row).factors)
            for number in range(pooled.rank)
        ]
        for row in rows
    ]
    kept = [index for index, numbers in enumerate(components) if numbers]
    if not kept:
        return None
    width = max(map(len, components))
    padded = [[*components[index], *[0] * (width - len(components[index]))] for index in kept]
    indices = transfer.integers([(index,) for index in kept], 1)[0]
    every = len(kept) == len(rows)
    return ContextIndex(None if every else indices, transfer.integers(padded, width).T)


def _marker_index(rows: Sequence[IndexedRow], transfer: Transfer) -> MarkerIndex | None:
    """Return the index of the rows' markers; None if no row has one."""
    windows = [_goal(row).window for row in rows]
    if not any(window.after is not None or window.ends_at_marker for window in windows):
        return None
    integers = []
    for window in windows:
        markers = [
            marker if isinstance(marker, PooledMarker) else NO_MARKER
            for marker in (window.after, window.until)
        ]
        parts = [(one.classes, one.transitions, one.num_classes, one.found) for one in markers]
        integers.append((*parts[0], *parts[1], -1 if window.length is None else window.length))
    return MarkerIndex(*transfer.integers(integers, len(MarkerIndex._fields)))


def _automaton_integers(index: int, goal: _Goal) -> tuple[int, ...] | None:
    """Return the integers of a goal's automaton, in the order of `AutomatonRows`."""
    automaton = goal.pooled.automaton
    if automaton is None:
        return None
    first = (automaton.classes, automaton.transitions, automaton.states, automaton.targets)
    return goal.row, index, *first, automaton.num_classes, automaton.num_targets


def _automaton_rows(integers: Sequence[tuple[int, ...]], transfer: Transfer) -> AutomatonRows:
    return AutomatonRows(*transfer.integers(integers, len(AutomatonRows._fields)))


class _Constrained(NamedTuple):
    """A goal that has an automaton."""

    goal: _Goal
    integers: tuple[int, ...]
    first_column: int


def _corrections(
    goals: Sequence[_Goal], pool: TablePool, kernels: Kernels, transfer: Transfer
) -> tuple[AutomatonIndex, ...]:
    """Return the indices by which the factors of listed tokens are corrected."""
    groups: dict[str, list[_Constrained]] = {}
    columns = accumulate((goal.pooled.num_terms for goal in goals), initial=0)
    for index, (goal, column) in enumerate(zip(goals, columns, strict=False)):
        integers = _automaton_integers(index, goal)
        if integers is not None:
            key = "" if kernels.corrects_together else goal.factor.key
            groups.setdefault(key, []).append(_Constrained(goal, integers, column))
    return tuple(_correction(group, pool, transfer) for group in groups.values())


def _correction(
    members: Sequence[_Constrained], pool: TablePool, transfer: Transfer
) -> AutomatonIndex:
    columns = [
        (
            member.first_column + term,
            row,
            member.goal.pooled.weights + term,
            int(member.goal.pooled.kind == EapKind.LOGARITHMIC),
        )
        for row, member in enumerate(members)
        for term in range(member.goal.pooled.num_terms)
    ]
    column, column_rows, weights, is_log = transfer.integers(columns, 4)
    keys = dict.fromkeys(member.goal.factor.key for member in members)
    listed = [pool.listed(key) for key in keys]
    tokens, emission = listed[0]
    if len(listed) > 1:
        tokens = torch.unique(torch.cat([tokens for tokens, _ in listed]))
        emission = pool.hmm.emission.subset(tokens)
    return AutomatonIndex(
        _automaton_rows([member.integers for member in members], transfer),
        column,
        column_rows,
        weights.unsqueeze(1),
        is_log.bool().unsqueeze(1),
        max(member.integers[-1] for member in members),
        tokens,
        emission,
    )
