"""The automata of a batch's rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from foretrace.hmm.emission import EmissionSubset
from foretrace.steering.planned import PlannedGoal
from foretrace.steering.pool import TablePool
from foretrace.steering.transfer import Transfer


class AutomatonRows(NamedTuple):
    """Numbers of every row whose goal has an automaton: (A,) int64 each."""

    rows: Tensor  # position in the plan
    goals: Tensor  # position in the plan
    classes: Tensor  # row of the pool's token classes
    transitions: Tensor  # first of the automaton's transitions in the pool
    states: Tensor  # first of its states
    targets: Tensor  # first of its distinct targets
    num_classes: Tensor
    num_targets: Tensor


@dataclass(frozen=True, eq=False)
class AutomatonPlan:
    """Rows with an automaton whose factors are corrected together."""

    rows: AutomatonRows
    columns: Tensor  # (C,) columns of the automata's goals: position in the plan
    column_rows: Tensor  # (C,) position in `rows`
    column_weights: Tensor  # (C, 1) row of the pool's token weights
    logarithmic: Tensor  # (C, 1) bool: the weights are logarithms
    max_targets: int
    tokens: Tensor  # (U,) all tokens that one of the automata lists, increasing
    emission: EmissionSubset  # of these tokens


class ConstrainedGoal(NamedTuple):
    """A goal that has an automaton."""

    position: int
    """Its position in the plan's goals."""
    first_column: int
    goal: PlannedGoal


def constrained_goals(goals: Sequence[PlannedGoal]) -> list[ConstrainedGoal]:
    """List the goals that have an automaton: at most one per row."""
    columns = accumulate((goal.num_terms for goal in goals), initial=0)
    return [
        ConstrainedGoal(index, column, goal)
        for index, (goal, column) in enumerate(zip(goals, columns, strict=False))
        if goal.entry.automaton is not None
    ]


def plan_rows(goals: Sequence[ConstrainedGoal], transfer: Transfer) -> AutomatonRows | None:
    """Return the numbers of rows with an automaton; None if there are none."""
    if not goals:
        return None
    numbers = [_numbers(goal) for goal in goals]
    return AutomatonRows(*transfer.integers(numbers, len(AutomatonRows._fields)))


def plan_corrections(
    goals: Sequence[ConstrainedGoal], pool: TablePool, transfer: Transfer
) -> tuple[AutomatonPlan, ...]:
    """Return the plans by which the factors of listed tokens are corrected.

    On a GPU there is one plan, over the tokens that any automaton lists: the number of operations
    then does not depend on that of the automata. On a CPU, where arithmetic costs more than
    operations, every automaton has its own plan, over its own tokens.
    """
    groups: dict[int, list[ConstrainedGoal]] = {}
    for goal in goals:
        key = id(goal.goal.goal.lookahead) if is_cpu(pool) else 0
        groups.setdefault(key, []).append(goal)
    return tuple(_plan_correction(group, pool, transfer) for group in groups.values())


def is_cpu(pool: TablePool) -> bool:
    """Return whether the pool is on a CPU."""
    return pool.hmm.device.type == "cpu"


def _numbers(constrained: ConstrainedGoal) -> tuple[int, ...]:
    """Return the numbers of a row, in the order of `AutomatonRows`."""
    entry = constrained.goal.entry.automaton
    assert entry is not None
    places = (entry.classes, entry.transitions, entry.states, entry.targets)
    sizes = (entry.num_classes, entry.num_targets)
    return constrained.goal.row, constrained.position, *places, *sizes


def _plan_correction(
    goals: Sequence[ConstrainedGoal], pool: TablePool, transfer: Transfer
) -> AutomatonPlan:
    columns = [
        (
            constrained.first_column + term,
            row,
            constrained.goal.entry.weights + term,
            int(constrained.goal.goal.lookahead.kind.logarithmic),
        )
        for row, constrained in enumerate(goals)
        for term in range(constrained.goal.num_terms)
    ]
    column, column_rows, weights, is_log = transfer.integers(columns, 4)
    numbers = [_numbers(goal) for goal in goals]
    return AutomatonPlan(
        AutomatonRows(*transfer.integers(numbers, len(AutomatonRows._fields))),
        column,
        column_rows,
        weights.unsqueeze(1),
        is_log.bool().unsqueeze(1),
        max(row[-1] for row in numbers),
        *_listed_tokens(goals, pool),
    )


def _listed_tokens(
    goals: Sequence[ConstrainedGoal], pool: TablePool
) -> tuple[Tensor, EmissionSubset]:
    """Return the union of the tokens that the automata list, and their emission."""
    lookaheads = {id(goal.goal.goal.lookahead): goal.goal.goal.lookahead for goal in goals}
    automata = [lookahead.automaton for lookahead in lookaheads.values()]
    listed = [(one.tokens, one.emission) for one in automata if one is not None]
    if len(listed) == 1:
        return listed[0]
    tokens = torch.unique(torch.cat([tokens for tokens, _ in listed]))
    return tokens, pool.hmm.emission.subset(tokens)
