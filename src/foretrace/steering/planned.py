"""The rows and goals of a batch before they are planned."""

from enum import IntEnum
from typing import NamedTuple

from foretrace.steering.goal import Goal
from foretrace.steering.pool import LookaheadEntry
from foretrace.steering.request import Request


class GoalKind(IntEnum):
    """How the factor of a goal is computed from its terms."""

    LOGARITHMIC = 0
    """One term, whose weights are logarithms."""
    LINEAR = 1
    """A sum of terms."""
    COMPLEMENT = 2
    """A sum of terms of both signs, whose tables and weights are 1 minus the weight."""


class PlannedRow(NamedTuple):
    """A row to plan: its index in the logits, its slot, and its request with goals."""

    row: int
    slot: int
    request: Request


class PlannedGoal(NamedTuple):
    """A goal of a planned row."""

    row: int
    """The position of its row in the plan."""
    goal: Goal
    past: int
    """The position of its first term in the flattened pasts of all slots."""
    entry: LookaheadEntry

    @property
    def group(self) -> tuple[GoalKind, bool]:
        """The kind of the goal, and whether it has a transform."""
        kind = self.goal.lookahead.kind
        transformed = not self.goal.transform.is_identity
        if kind.complement:
            return GoalKind.COMPLEMENT, transformed
        return GoalKind.LOGARITHMIC if kind.logarithmic else GoalKind.LINEAR, transformed

    @property
    def num_terms(self) -> int:
        """The number of terms."""
        return len(self.goal.lookahead.terms)
