"""A goal: the lookahead of an attribute, and how strongly to steer toward it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from foretrace.attribute import LogitAffine
from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM
from foretrace.lookahead.levels import DEFAULT_LEVEL, strength_of
from foretrace.lookahead.lookahead import Lookahead
from foretrace.steering.window import Marker, Window, require_window

IDENTITY = LogitAffine()


@dataclass(frozen=True, eq=False)
class Goal:
    """An attribute to steer toward, and a strength.

    Steering with strength k generates a text x with a probability proportional to
    p_LM(x) * a(x) ** k, or to p_LM(x) * exp(k * sum of rewards) for evidence. Strength 1 of a
    product conditions on the attribute. The price of steering, in nats per token, increases with
    the strength. A level is the strength for a certain price.

    Strong goals could be met by stopping early. By default, end-of-text tokens keep the probability
    that the language model gives them.

    A goal is about all generated tokens, or about those after a marker and within a window. The
    logits of other tokens are not changed, and they do not count for the attribute.

    Args:
        lookahead: The lookahead of the attribute.
        strength: The exponent k of the attribute; more than 0. By default, that of the level. The
            goal's `lookahead` is that of `attribute ** strength`.
        level: "mild", "medium" or "strong". `foretrace calibrate` finds the strengths of an
            attribute's levels. Without it, they are found with the HMM alone. Constraints and
            attributes without powers have strength 1 at all levels.
        transform: The paper's transform of the EAP, sigma(scale * logit(p) + shift). It is applied
            after the expectation, with strength 1. By default, none.
        neutral_end: Whether end-of-text tokens keep their probability. If not, steering is exact
            also for the length of texts.
        after: A marker of `foretrace.marker`. The goal begins with the token after it, or at once
            if the prompt ends with it, apart from white space. By default, it begins at once.
        window: How many tokens the goal is about, or a marker with which it ends. By default, it
            ends with the text.

    Raises:
        InvalidInputError: If the first argument is not a Lookahead, if the strength is not above 0,
            if the attribute has no powers and the strength is not 1, or if `after` or `window` is
            not as described.

    Example:
        >>> goal = ft.Goal(ft.Lookahead(hmm, attribute, horizon=8), strength=5.0)
        >>> goal.lookahead.attribute.name
        'nontoxic ** 5'
        >>> answer = ft.Goal(
        ...     goal.lookahead, 1.0, after=ft.marker("</think>", tokenizer), window=64
        ... )
    """

    lookahead: Lookahead
    strength: float | None = None
    level: str = DEFAULT_LEVEL
    transform: LogitAffine = IDENTITY
    neutral_end: bool = True
    after: Marker | None = None
    window: int | Marker | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.lookahead, Lookahead):
            raise InvalidInputError(
                f"A goal needs a Lookahead, but got {type(self.lookahead).__name__}. For an "
                f"attribute, pass Lookahead(hmm, attribute)."
            )
        if self.lookahead.attribute.evidence and not self.transform.is_identity:
            raise InvalidInputError(
                f"A transform applies to probabilities, and the EAP of evidence is none. Steer "
                f"toward '{self.lookahead.attribute.name}' by strength or level alone."
            )
        require_window(self.after, self.window)
        strength = self.strength
        if strength is None:
            attribute, hmm = self.lookahead.attribute, self.lookahead.hmm
            plain = self.transform.is_identity
            strength = strength_of(attribute, self.level, hmm) if plain else 1.0
            object.__setattr__(self, "strength", strength)
        lookahead = self.lookahead.at_strength(strength)
        lookahead.tables  # noqa: B018  built now, and not in a decoding step
        object.__setattr__(self, "lookahead", lookahead)

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Return the goal itself: it does not change, and its tables are large."""
        return self


def common_hmm(goals: Iterable[Goal]) -> HMM | None:
    """Return the HMM of all goals; None if there is no goal.

    Raises:
        InvalidInputError: If they have several.
    """
    hmms = {id(goal.lookahead.hmm): goal.lookahead.hmm for goal in goals}
    if len(hmms) > 1:
        raise InvalidInputError(
            "All goals of a batch must use the same HMM object. Load it once, and create every "
            "Lookahead with it."
        )
    return next(iter(hmms.values()), None)


def common_window(goals: Iterable[Goal]) -> Window:
    """Return the window of all goals of a sequence.

    Raises:
        InvalidInputError: If they differ. Goals of one sequence are one product, or factors of the
            same token.
    """
    windows = {Window(goal.after, goal.window) for goal in goals}
    if len(windows) > 1:
        raise InvalidInputError(
            "The goals of one text begin or end at different tokens. They are steered toward as "
            "one product: give all of them the same `after` and the same `window`."
        )
    return windows.pop() if windows else Window()
