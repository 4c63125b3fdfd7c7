"""The settings of a fit."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from operator import index

from foretrace.attribute.terms import MAX_TERMS
from foretrace.attribute.transform import LogitAffine
from foretrace.errors import InvalidInputError

OBJECTIVES = ("auto", "cross-entropy", "log-mse", "evidence")
MIXTURE_OBJECTIVES = ("auto", "cross-entropy")


@dataclass(frozen=True)
class FitConfig:
    """The settings of a fit.

    Attributes:
        objective: How to fit. "cross-entropy" fits a product of weights of at most 1: what a text
            must avoid. "log-mse" does the same as the paper does, which is faster and ranks less
            well. "evidence" fits log-odds by logistic regression: tokens speak for and against.
            "auto" fits by cross-entropy and evidence, and keeps evidence unless the product ranks
            held-out texts clearly better. The record of the fit says why.
        terms: The largest number of products in the mixture; 1 for log-mse and evidence. With
            "auto", more than 1 means cross-entropy.
        transform: The transform of the scores before the fit. By default, that of a product is
            chosen on held-out texts, and evidence uses plain scores. If `by_absence` is set, it
            applies to the scores of the absence.
        penalty: More keeps rare tokens from extreme values. For products, the number of texts with
            the attribute that are added for every token. For evidence, the factor of a squared
            (L2) penalty: at 1, the prior of the reward of a token in n of N texts has the standard
            deviation 0.1 log(N / n).
        min_texts: Tokens in fewer texts get no weight and no reward.
        by_absence: Whether to fit the absence of the attribute and negate the result. This suits
            attributes that single tokens reveal, such as a topic or a role. The paper recommends it
            for rare attributes. With "auto", it means cross-entropy. It does not change evidence,
            which is symmetric.
        held_out: The share of the texts to hold out, if there are no validation texts.
        seed: The seed of the held-out split and of the mixture's start.
        keep: The ids of tokens that must not decide. They get no weight and no reward, and the
            other tokens are fitted without them.

    Raises:
        InvalidInputError: If a setting is out of range.

    Example:
        >>> ft.FitConfig(objective="evidence", keep=[7, 3]).keep
        (3, 7)
    """

    objective: str = "auto"
    terms: int = 1
    transform: LogitAffine | None = None
    penalty: float = 1.0
    min_texts: int = 2
    by_absence: bool = False
    held_out: float = 0.1
    seed: int = 0
    keep: Sequence[int] = ()

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise InvalidInputError(
                f"The objective must be {' or '.join(OBJECTIVES)}, not '{self.objective}'."
            )
        max_terms = MAX_TERMS if self.objective in MIXTURE_OBJECTIVES else 1
        if not 1 <= self.terms <= max_terms:
            raise InvalidInputError(
                f"{self.objective} cannot fit {self.terms} terms: log-mse fits 1, evidence 1, "
                f"cross-entropy 1 to {MAX_TERMS:,}."
            )
        valid_penalty = isfinite(self.penalty) and self.penalty >= 0
        if not (valid_penalty and self.min_texts >= 1 and 0 < self.held_out < 1 and self.seed >= 0):
            raise InvalidInputError(
                f"The penalty must be 0 or more, min_texts 1 or more, held_out between 0 and 1 and "
                f"the seed 0 or more; they are {self.penalty}, {self.min_texts}, {self.held_out} "
                f"and {self.seed}."
            )
        try:
            keep = tuple(sorted({index(token) for token in self.keep}))
        except TypeError:
            raise InvalidInputError("`keep` must be a sequence of token ids.") from None
        object.__setattr__(self, "keep", keep)
