"""What a row is steered toward, and how strongly."""

from dataclasses import dataclass, field

from foretrace.attribute import LogitAffine
from foretrace.lookahead.lookahead import Lookahead


@dataclass(frozen=True, eq=False)
class Goal:
    """An attribute to steer toward; its EAP goes through sigma(strength * logit + shift).

    Strength 1 and shift 0 leave the EAP as it is: exact conditioning on the attribute.

    To end a text is a way to lack nothing, and goals of great strength drive texts to it. With
    `neutral_end`, a text ends with the probability that the LM gives to its end: no escape.
    """

    lookahead: Lookahead
    strength: float = 1.0
    shift: float = 0.0
    neutral_end: bool = False
    transform: LogitAffine = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "transform", LogitAffine(self.strength, self.shift))
