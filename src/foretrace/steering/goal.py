"""A goal: the lookahead of an attribute, and how strongly to steer toward it."""

from dataclasses import dataclass

from foretrace.attribute import LogitAffine
from foretrace.errors import InvalidInputError
from foretrace.lookahead.levels import DEFAULT_LEVEL, strength_of
from foretrace.lookahead.lookahead import Lookahead

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

    Args:
        lookahead: The lookahead of the attribute.
        strength: The exponent k of the attribute; more than 0. By default, that of the level. The
            goal's `lookahead` is that of `attribute ** strength`.
        level: "mild", "medium" or "strong". `foretrace calibrate` finds the strengths of an
            attribute's levels. Without it, they are found with the HMM alone. Constraints and
            attributes without powers have strength 1 at all levels.
        transform: The paper's transform of the EAP, sigma(scale * logit(p) + shift), which is
            applied after the expectation, with strength 1. By default, none.
        neutral_end: Whether end-of-text tokens keep their probability. If not, steering is exact
            also for the length of texts.

    Raises:
        InvalidInputError: If the first argument is not a Lookahead, if the strength is not above 0,
            or if the attribute has no powers and the strength is not 1.

    Example:
        >>> goal = ft.Goal(ft.Lookahead(hmm, attribute, horizon=8), strength=5.0)
        >>> goal.lookahead.attribute.name
        'nontoxic ** 5'
    """

    lookahead: Lookahead
    strength: float | None = None
    level: str = DEFAULT_LEVEL
    transform: LogitAffine = IDENTITY
    neutral_end: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.lookahead, Lookahead):
            raise InvalidInputError(
                f"A goal needs a Lookahead, but got {type(self.lookahead).__name__}. For an "
                f"attribute, pass Lookahead(hmm, attribute)."
            )
        if self.lookahead.attribute.evidence and not self.transform.identity:
            raise InvalidInputError(
                f"A transform applies to probabilities, and the EAP of evidence is none. Steer "
                f"toward '{self.lookahead.attribute.name}' by strength or level alone."
            )
        strength = self.strength
        if strength is None:
            attribute, hmm = self.lookahead.attribute, self.lookahead.hmm
            plain = self.transform.identity
            strength = strength_of(attribute, self.level, hmm) if plain else 1.0
            object.__setattr__(self, "strength", strength)
        lookahead = self.lookahead.at_strength(strength)
        lookahead.tables  # noqa: B018  built now, and not in a decoding step
        object.__setattr__(self, "lookahead", lookahead)
