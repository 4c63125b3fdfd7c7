"""The plan of a batch: for every row, where its goals' tables, weights and automata are.

A plan is built on the host and copied to the device when rows come, go or change places, and not at
every step. What changes at every step is in `SlotState`, on the device.

A *column* is one term of one goal of one row. Goals are sorted by kind, and columns by goal, so
that each kind is a slice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isfinite, log
from typing import NamedTuple

from torch import Tensor

from foretrace.steering.automaton_plan import (
    AutomatonPlan,
    AutomatonRows,
    constrained_goals,
    plan_corrections,
    plan_rows,
)
from foretrace.steering.marker_plan import MarkerPlan, plan_markers
from foretrace.steering.planned import GoalKind, PlannedGoal, PlannedRow
from foretrace.steering.pool import TablePool
from foretrace.steering.request import Request
from foretrace.steering.transfer import Transfer
from foretrace.steering.window import Window

NEVER = 1 << 40  # a position that no text reaches


class GoalGroup(NamedTuple):
    """The goals of one kind, with or without transforms: slices of the plan's goals and columns."""

    kind: GoalKind
    transformed: bool
    goals: slice
    columns: slice


class NeutralEnds(NamedTuple):
    """End-of-text tokens of every row, which may keep their probability."""

    tokens: Tensor  # (n, E); 0 for none
    is_copy: Tensor  # (n, E) bool: whether the token is in an earlier column, too
    is_neutral: Tensor  # (n, 1) bool


class Rows(NamedTuple):
    """Numbers of every row: (n,) int64 each."""

    rows: Tensor  # index in the logits
    slots: Tensor
    limit: Tensor  # tokens to generate at most
    horizon: Tensor  # tokens to look ahead at most
    min_tokens: Tensor  # fewest tokens that satisfy the constraint


class Columns(NamedTuple):
    """Numbers of every column: (C,) int64 each."""

    rows: Tensor  # position in the plan
    goals: Tensor  # position in the plan
    tables: Tensor  # row of the pool's tables for no token to come, in automaton state 0
    table_stride: Tensor  # rows per token to come
    table_horizon: Tensor
    weights: Tensor  # row of the pool's token weights
    past: Tensor  # position in the flattened pasts of all slots
    constrained: Tensor  # 1 if the goal has an automaton, else 0


@dataclass(frozen=True, eq=False)
class Plan:
    """The rows, goals and columns of a batch, on the device: n, G and C of them."""

    rows: Rows
    max_price: Tensor | None  # (n, 1) float32: nats that a step may cost
    ends: Tensor | None  # (n, E) tokens that end a text, padded with the first; -1 for none
    neutral_ends: NeutralEnds | None
    once: Tensor | None  # (n, 1): row of the pool's rewards that count once
    columns: Columns
    coefficients: Tensor  # (C,) float64
    log_coefficients: Tensor  # (C,) float64, of single terms; 0 for terms of sums
    goal_rows: Tensor  # (G,) position in the plan
    scale: Tensor  # (G,) float64, of the transform
    shift: Tensor  # (G,) float64
    groups: tuple[GoalGroup, ...]
    markers: MarkerPlan | None
    automata: AutomatonRows | None
    corrections: tuple[AutomatonPlan, ...]
    one_goal_per_row: bool
    """Whether goal i is the only goal of row i: no index is needed then."""
    one_column_per_row: bool
    all_rows: bool
    """Whether the plan covers all rows of the logits, in order."""
    has_windows: bool
    """Whether a row may be outside the window of its goals."""

    def __len__(self) -> int:
        return len(self.rows.slots)


def build_plan(
    rows: Sequence[PlannedRow], pool: TablePool, shape: tuple[int, int], num_terms: int
) -> Plan:
    """Build the plan of the rows that have goals.

    Args:
        rows: The rows.
        pool: The pool, to which the goals' lookaheads are added.
        shape: The shape of the logits.
        num_terms: The number of terms that the state has room for, in every slot.

    Returns:
        The plan, on the pool's device.
    """
    transfer = Transfer(pool.hmm.device)
    goals = _planned_goals(rows, pool, num_terms)
    columns = [column for index, goal in enumerate(goals) for column in _columns(index, goal)]
    constrained = constrained_goals(goals)
    ends = [_ends(row.request, shape[1]) for row in rows]
    padded_ends = _padded(ends, transfer)
    row_numbers = [_row_numbers(row) for row in rows]
    column_numbers = Columns(*transfer.integers(columns, len(Columns._fields)))
    transforms = [(goal.goal.transform.scale, goal.goal.transform.shift) for goal in goals]
    coefficients = transfer.floats([pair for goal in goals for pair in _coefficients(goal)], 2)
    scale, shift = transfer.floats(transforms, 2)
    in_order = list(range(len(rows)))
    return Plan(
        rows=Rows(*transfer.integers(row_numbers, len(Rows._fields))),
        max_price=_max_prices(rows, transfer),
        ends=padded_ends,
        neutral_ends=_neutral_ends(rows, padded_ends, transfer),
        once=_once_rewards(rows, pool, transfer),
        columns=column_numbers,
        coefficients=coefficients[0],
        log_coefficients=coefficients[1],
        goal_rows=transfer.integers([(goal.row,) for goal in goals], 1)[0],
        scale=scale,
        shift=shift,
        groups=_groups(goals),
        markers=plan_markers([row.request.window for row in rows], pool.markers, transfer),
        automata=plan_rows(constrained, transfer),
        corrections=plan_corrections(constrained, pool, transfer),
        one_goal_per_row=[goal.row for goal in goals] == in_order,
        one_column_per_row=[column[0] for column in columns] == in_order,
        all_rows=[row.row for row in rows] == list(range(shape[0])),
        has_windows=any(row.request.window != Window() for row in rows),
    )


def _planned_goals(
    rows: Sequence[PlannedRow], pool: TablePool, num_terms: int
) -> list[PlannedGoal]:
    """List the goals of all rows by kind, and within a kind in the order of the rows."""
    goals = []
    for index, row in enumerate(rows):
        sizes = [len(goal.lookahead.terms) for goal in row.request.goals]
        pasts = accumulate(sizes, initial=row.slot * num_terms)
        for goal, past in zip(row.request.goals, pasts, strict=False):
            goals.append(PlannedGoal(index, goal, past, pool.add(goal.lookahead)))
    return sorted(goals, key=lambda goal: goal.group)


def _groups(goals: Sequence[PlannedGoal]) -> tuple[GoalGroup, ...]:
    """Return the slices of the goals and columns of each kind that occurs."""
    groups: list[GoalGroup] = []
    goal = column = 0
    for key in dict.fromkeys(goal.group for goal in goals):
        members = [goal for goal in goals if goal.group == key]
        next_goal = goal + len(members)
        next_column = column + sum(goal.num_terms for goal in members)
        groups.append(GoalGroup(*key, slice(goal, next_goal), slice(column, next_column)))
        goal, column = next_goal, next_column
    return tuple(groups)


def _columns(index: int, planned: PlannedGoal) -> list[tuple[int, ...]]:
    """Return the numbers of a goal's columns, in the order of `Columns`."""
    lookahead, entry = planned.goal.lookahead, planned.entry
    num_terms, num_states = lookahead.tables.log_scales.shape[1:]
    return [
        (
            planned.row,
            index,
            entry.tables + term * num_states,
            num_terms * num_states,
            lookahead.horizon,
            entry.weights + term,
            planned.past + term,
            int(entry.automaton is not None),
        )
        for term in range(num_terms)
    ]


def _coefficients(planned: PlannedGoal) -> list[tuple[float, float]]:
    """Return the coefficients of a goal's terms, and their logarithms if there is one term."""
    is_single = planned.group[0] == GoalKind.LOGARITHMIC
    coefficients = planned.goal.lookahead.terms.coefficients.tolist()
    return [(value, log(value) if is_single else 0.0) for value in coefficients]


def _row_numbers(planned: PlannedRow) -> tuple[int, ...]:
    """Return the numbers of a row, in the order of `Rows`."""
    request = planned.request
    return (
        planned.row,
        planned.slot,
        request.limit,
        NEVER if request.horizon is None else request.horizon,
        request.min_tokens,
    )


def _ends(request: Request, vocab_size: int) -> list[int]:
    """Return the tokens that end a text; those outside the vocabulary cannot be generated."""
    return [token for token in request.ends if 0 <= token < vocab_size]


def _padded(ends: Sequence[Sequence[int]], transfer: Transfer) -> Tensor | None:
    """Pad the end tokens of every row with its first, or with -1 if it has none: (n, E)."""
    width = max(map(len, ends), default=0)
    if not width:
        return None
    rows = [[*tokens, *[tokens[0] if tokens else -1] * (width - len(tokens))] for tokens in ends]
    return transfer.integers(rows, width).T


def _neutral_ends(
    rows: Sequence[PlannedRow], padded: Tensor | None, transfer: Transfer
) -> NeutralEnds | None:
    """Return the padded end tokens of every row, if those of a row keep their probability."""
    neutral = [any(goal.neutral_end for goal in row.request.goals) for row in rows]
    if padded is None or not any(neutral):
        return None
    is_neutral = transfer.integers([(int(flag),) for flag in neutral], 1).T.bool()
    same = padded.unsqueeze(2) == padded.unsqueeze(1)
    is_copy = same.tril(-1).any(2)
    return NeutralEnds(padded.clamp_min(0), is_copy, is_neutral & (padded[:, :1] >= 0))


def _max_prices(rows: Sequence[PlannedRow], transfer: Transfer) -> Tensor | None:
    """Return the limits of the price of every row, if there are any."""
    limits = [(row.request.max_price,) for row in rows]
    if not any(isfinite(limit) for (limit,) in limits):
        return None
    return transfer.floats(limits, 1).T.float()


def _once_rewards(rows: Sequence[PlannedRow], pool: TablePool, transfer: Transfer) -> Tensor | None:
    """Return where the pool has each row's rewards that count once, if there are any."""
    if not any(row.request.counts_once for row in rows):
        return None
    entries = [[pool.add(goal.lookahead).once for goal in row.request.goals] for row in rows]
    return transfer.integers([(max(row),) for row in entries], 1).T
