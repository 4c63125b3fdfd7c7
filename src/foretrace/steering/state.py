"""What is known of a text while it is written."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from foretrace.steering.goal import Goal
from foretrace.steering.request import Request


@dataclass(frozen=True, eq=False)
class Row:
    """A text and its state."""

    request: Request
    written: int
    """How many tokens."""
    predicted: Tensor  # (h,): p(z of the next token | prompt and written)
    past: tuple[Tensor, ...]  # of each goal: (K,) sums of log-weights, float64
    states: tuple[Tensor | None, ...]  # of each goal that has an automaton: (1,), where that is


class Pursuit(NamedTuple):
    """A goal of a row, and what is known of it."""

    place: int
    """Of the row, among others."""
    row: Row
    goal: Goal
    past: Tensor  # (K,)
    state: Tensor | None  # (1,), if the goal has an automaton

    @property
    def left(self) -> int:
        """How many tokens may follow the next one."""
        return self.row.request.left(self.row.written)


def pursuits(rows: Iterable[tuple[int, Row]]) -> Iterator[Pursuit]:
    """List what rows pursue, goal by goal."""
    for place, row in rows:
        for each in zip(row.request.goals, row.past, row.states, strict=True):
            yield Pursuit(place, row, *each)
