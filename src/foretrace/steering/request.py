"""The goals and limits of one sequence to generate."""

from dataclasses import dataclass, field
from math import inf

from foretrace.errors import InvalidInputError
from foretrace.steering.goal import Goal, common_window
from foretrace.steering.window import Marker, Window

MAX_REWARD_PRICE = 1.0  # nats per step: several times the price of the strongest level


@dataclass(frozen=True, eq=False)
class Request:
    """The goals and limits of one sequence; the same object at every step.

    Args:
        goals: The goals. Their factors multiply; a request without goals is not steered.
        prompt: The token ids of the prompt.
        limit: The largest number of tokens to generate.
        horizon: The largest number of tokens to look ahead, if less than the goals' horizons.
        ends: Tokens that end the sequence. The HMM's end-of-text tokens are added.

    Attributes:
        window: The part of the generated text that the goals are about.

    Raises:
        InvalidInputError: If a constraint does not fit into `limit` tokens or into the window, if
            more than one goal has a constraint, if the goals have different windows, or if a goal
            requires text in a window that ends at a marker.

    Example:
        >>> from foretrace.steering import Request
        >>> request = Request((ft.Goal(ft.Lookahead(hmm, attribute, 8)),), prompt=(5,), limit=20)
        >>> request.ends == hmm.config.eos_token_ids
        True
        >>> request.tokens_after_next(num_generated=3)
        16
    """

    goals: tuple[Goal, ...]
    prompt: tuple[int, ...]
    limit: int
    horizon: int | None = None
    ends: tuple[int, ...] = ()
    window: Window = field(init=False)

    def __post_init__(self) -> None:
        hmm_ends = [end for goal in self.goals for end in goal.lookahead.hmm.config.eos_token_ids]
        object.__setattr__(self, "ends", tuple(dict.fromkeys((*self.ends, *hmm_ends))))
        window = common_window(self.goals)
        object.__setattr__(self, "window", window)
        limit = self.limit if window.length is None else min(self.limit, window.length)
        for goal in self.goals:
            goal.lookahead.require_feasible(limit)
        if isinstance(window.until, Marker):
            require_no_text(any(goal.lookahead.requires_text for goal in self.goals))
        require_single_constraint(sum(goal.lookahead.automaton is not None for goal in self.goals))

    @property
    def min_tokens(self) -> int:
        """Return the fewest tokens that can satisfy the goals' constraint."""
        return max((goal.lookahead.min_tokens for goal in self.goals), default=0)

    @property
    def counts_once(self) -> bool:
        """Return whether a goal has rewards that count once per text."""
        return any(goal.lookahead.once_rewards is not None for goal in self.goals)

    @property
    def max_price(self) -> float:
        """Return how many nats a step may cost.

        Additive rewards can pay for any token. Products of weights up to 1 only avoid tokens, which
        costs as much as the language model's probability of them demands. Rewards that do not count
        once are not limited: steering by them is exact.
        """
        return MAX_REWARD_PRICE if self.counts_once else inf

    def tokens_after_next(self, num_generated: int, window_end: int | None = None) -> int:
        """Return how many tokens may follow the next one.

        Args:
            num_generated: The number of tokens generated so far.
            window_end: The number of generated tokens up to the end of the window, if it is known.

        Returns:
            A number of tokens, 0 or more.
        """
        limit = self.limit if window_end is None else min(self.limit, window_end)
        return max(0, limit - num_generated - 1)

    def tokens_ahead(self, num_generated: int, window_end: int | None = None) -> int:
        """Return how many tokens after the next one the request looks ahead.

        Args:
            num_generated: The number of tokens generated so far.
            window_end: The number of generated tokens up to the end of the window, if it is known.

        Returns:
            A number of tokens, 0 or more.
        """
        after_next = self.tokens_after_next(num_generated, window_end)
        return after_next if self.horizon is None else min(after_next, self.horizon)


def require_single_constraint(count: int) -> None:
    """Check that at most one goal of a request has a constraint: an automaton.

    Args:
        count: The number of goals that have one.

    Raises:
        InvalidInputError: If there is more than one. Each constraint forbids tokens that cannot
            satisfy it any more; two of them may forbid every token.
    """
    if count > 1:
        raise InvalidInputError(
            f"{count} goals say which texts must or must not occur, but only one goal of a request "
            f'may. Join them by &, as in nontoxic & contains("refund"): apart, they might leave no '
            f"token that satisfies all of them."
        )


def require_no_text(required: bool) -> None:
    """Check that no text is required in a window that ends at a marker.

    Args:
        required: Whether a goal requires text.

    Raises:
        InvalidInputError: If it does. The language model may write the marker before the text.
    """
    if required:
        raise InvalidInputError(
            "A goal requires text in a window that ends at a marker, and the marker may come "
            "before the text. Let the window be a number of tokens, or end with the text."
        )
