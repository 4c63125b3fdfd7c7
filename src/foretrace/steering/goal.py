"""A goal: the lookahead of an attribute, and the strength and shift of steering toward it."""

from dataclasses import dataclass, field

from foretrace.attribute import LogitAffine
from foretrace.errors import InvalidInputError
from foretrace.lookahead.lookahead import Lookahead


@dataclass(frozen=True, eq=False)
class Goal:
    """An attribute to steer toward. Its EAP p becomes sigma(strength * logit(p) + shift).

    Strength 1 and shift 0 leave the EAP as it is: exact conditioning on the attribute.

    A strict goal can be met by stopping early, and strong goals make sequences end soon. With
    `neutral_end`, end-of-text tokens keep the probability that the language model gives them.

    Args:
        lookahead: The lookahead of the attribute.
        strength: The factor of the logit; more than 0.
        shift: The number that is added to the logit.
        neutral_end: Whether end-of-text tokens keep their probability.

    Raises:
        InvalidInputError: If the first argument is not a Lookahead, if the strength is not above 0,
            or if strength or shift is not finite.

    Example:
        >>> goal = ft.Goal(ft.Lookahead(hmm, attribute, horizon=8), strength=5.0, shift=-3.0)
        >>> goal.transform
        LogitAffine(scale=5.0, shift=-3.0)
    """

    lookahead: Lookahead
    strength: float = 1.0
    shift: float = 0.0
    neutral_end: bool = False
    transform: LogitAffine = field(init=False, repr=False)
    """The transform of the EAP."""

    def __post_init__(self) -> None:
        if not isinstance(self.lookahead, Lookahead):
            raise InvalidInputError(
                f"A goal needs a Lookahead, but got {type(self.lookahead).__name__}. For an "
                f"attribute, pass Lookahead(hmm, attribute)."
            )
        object.__setattr__(self, "transform", LogitAffine(self.strength, self.shift))
