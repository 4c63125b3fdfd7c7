"""The settings of a fit."""

from dataclasses import dataclass
from math import isfinite

from foretrace.attribute.terms import MAX_TERMS
from foretrace.attribute.transform import LogitAffine
from foretrace.errors import InvalidInputError

OBJECTIVES = ("cross-entropy", "log-mse")


@dataclass(frozen=True)
class FitConfig:
    """The settings of a fit.

    Attributes:
        objective: "cross-entropy", or "log-mse": the paper's, which is faster and ranks less well.
        terms: The largest number of products in the mixture; 1 for log-mse.
        transform: The transform of the scores before the fit. By default, it is chosen on held-out
            texts. If `by_absence` is set, it applies to the scores of the absence.
        penalty: The number of texts with the attribute that are added for every token. More keeps
            rare tokens from extreme weights.
        min_texts: Tokens in fewer texts get no weight.
        by_absence: Whether to fit the absence of the attribute and negate the result. This suits
            attributes that single tokens reveal, such as a topic or a role. The paper recommends it
            for rare attributes.
        held_out: The share of the texts to hold out, if there are no validation texts.
        seed: The seed of the held-out split and of the mixture's start.

    Raises:
        InvalidInputError: If a setting is out of range.

    Example:
        >>> ft.FitConfig(by_absence=True).objective
        'cross-entropy'
    """

    objective: str = "cross-entropy"
    terms: int = 1
    transform: LogitAffine | None = None
    penalty: float = 1.0
    min_texts: int = 2
    by_absence: bool = False
    held_out: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise InvalidInputError(
                f"The objective must be {' or '.join(OBJECTIVES)}, not '{self.objective}'."
            )
        if not 1 <= self.terms <= MAX_TERMS or (self.terms > 1 and self.objective == "log-mse"):
            raise InvalidInputError(
                f"{self.objective} cannot fit {self.terms} terms: log-mse fits 1, cross-entropy "
                f"1 to {MAX_TERMS:,}."
            )
        valid_penalty = isfinite(self.penalty) and self.penalty >= 0
        if not (valid_penalty and self.min_texts >= 1 and 0 < self.held_out < 1 and self.seed >= 0):
            raise InvalidInputError(
                f"The penalty must be 0 or more, min_texts 1 or more, held_out between 0 and 1 and "
                f"the seed 0 or more; they are {self.penalty}, {self.min_texts}, {self.held_out} "
                f"and {self.seed}."
            )
