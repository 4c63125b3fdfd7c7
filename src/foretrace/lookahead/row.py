"""What is asked for a text, and what is known of it while it is written."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from foretrace.errors import InvalidInputError
from foretrace.lookahead.goal import Goal


@dataclass(frozen=True, eq=False)
class Request:
    """What is asked for a row; the same object at every step."""

    goals: tuple[Goal, ...]
    """Their factors multiply; a row without goals is left as it is."""
    prompt: tuple[int, ...]
    limit: int
    """Tokens to write at most: what remains of them is looked ahead at, up to the horizon."""
    horizon: int | None = None
    """Look no further ahead than this."""
    ends: tuple[int, ...] = ()
    """Tokens that end the text; those of the HMM always do."""

    def __post_init__(self) -> None:
        own = [end for goal in self.goals for end in goal.lookahead.hmm.config.eos_token_ids]
        object.__setattr__(self, "ends", tuple(dict.fromkeys((*self.ends, *own))))
        for goal in self.goals:
            goal.lookahead.require_room(self.limit)
        if sum(goal.lookahead.reading is not None for goal in self.goals) > 1:
            raise InvalidInputError(
                "Two goals say what must occur or must not. Join them by & to one: apart, they "
                "might leave no token that suits both."
            )

    def left(self, written: int) -> int:
        """How many tokens may follow the next one."""
        return max(0, self.limit - written - 1)

    def remaining(self, written: int) -> int:
        """How many of them are looked at."""
        left = self.left(written)
        return left if self.horizon is None else min(left, self.horizon)


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
