"""What is asked for a text."""

from dataclasses import dataclass

from foretrace.errors import InvalidInputError
from foretrace.steering.goal import Goal


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
