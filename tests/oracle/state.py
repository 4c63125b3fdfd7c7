"""The state of sequences while they are generated."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from foretrace.steering.goal import Goal
from foretrace.steering.request import Request
from foretrace.steering.window import WindowState


@dataclass(frozen=True, eq=False)
class SequenceState:
    """The state of one sequence: all that the next steering step depends on."""

    request: Request
    num_generated: int
    predicted: Tensor  # (h,): p(HMM state of the next token | prompt and generated tokens)
    window: WindowState
    # Of the tokens in the window:
    log_past: tuple[Tensor, ...]  # for each goal: (K,) sums of log-weights, float64
    automaton_states: tuple[Tensor | None, ...]  # for each goal with an automaton: (1,)
    generated: Tensor | None = None  # (n,) ids, if rewards of a goal count once

    @property
    def in_window(self) -> bool:
        """Return whether the goals are about the next token."""
        return self.window.covers(self.num_generated)

    @property
    def is_steered(self) -> bool:
        """Return whether the next token is steered.

        It is not if the marker came so late that a required text does not fit into the limit.
        """
        request, begin = self.request, self.window.begin or 0
        return (
            bool(request.goals) and self.in_window and request.limit - begin >= request.min_tokens
        )


class GoalState(NamedTuple):
    """One goal of a sequence, and its state."""

    row: int
    """The index of the sequence in its batch."""
    sequence: SequenceState
    goal: Goal
    log_past: Tensor  # (K,)
    automaton_state: Tensor | None  # (1,), if the goal has an automaton

    @property
    def tokens_after_next(self) -> int:
        """Return how many tokens may follow the next one."""
        sequence = self.sequence
        return sequence.request.tokens_after_next(sequence.num_generated, sequence.window.end)


def goal_states(sequences: Iterable[tuple[int, SequenceState]]) -> Iterator[GoalState]:
    """List the goals of sequences and their states."""
    for row, sequence in sequences:
        goals, automaton_states = sequence.request.goals, sequence.automaton_states
        for goal, past, state in zip(goals, sequence.log_past, automaton_states, strict=True):
            yield GoalState(row, sequence, goal, past, state)
