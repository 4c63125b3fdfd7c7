"""What is asked for a text, and what is known of it while it is written."""

from dataclasses import dataclass

from torch import Tensor

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

    def remaining(self, written: int) -> int:
        """How many tokens may follow the next one, as far as is looked."""
        left = max(0, self.limit - written - 1)
        return left if self.horizon is None else min(left, self.horizon)


@dataclass(frozen=True, eq=False)
class Row:
    """A text and its state."""

    request: Request
    written: int
    """How many tokens."""
    predicted: Tensor  # (h,): p(z of the next token | prompt and written)
    past: tuple[Tensor, ...]  # of each goal: (K,) sums of log-weights, float64
