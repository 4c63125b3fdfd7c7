"""The config of an attribute: everything that its file holds besides the terms."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from operator import index
from typing import Any

from foretrace.errors import InvalidInputError
from foretrace.vocabulary import require_same_fingerprint


@dataclass(frozen=True)
class AttributeConfig:
    """The name and vocabulary of an attribute, and a record of its fit.

    Attributes:
        name: The name, as expressions and error messages show it.
        vocab_size: The number of tokens in the vocabulary; None if unknown.
        tokenizer_fingerprint: The fingerprint of the tokenizer's vocabulary, as
            `foretrace.fingerprint` returns it; None if unknown.
        fit: The settings, the data and the held-out metrics of the fit, as JSON values. Empty
            if the attribute was not fitted.
        levels: The strength of each level, such as {"mild": 2.0, "medium": 5.0}, as
            `foretrace calibrate` finds them. Empty if the attribute was not calibrated.
        negation_levels: The same for the negation of the attribute. To write a rare word costs
            more than to avoid it, so that the strengths differ.

    Example:
        >>> from foretrace.attribute import AttributeConfig
        >>> AttributeConfig("polite", vocab_size=4).vocab_size
        4
    """

    name: str = "attribute"
    vocab_size: int | None = None
    tokenizer_fingerprint: str | None = None
    fit: Mapping[str, Any] = field(default_factory=dict)
    levels: Mapping[str, float] = field(default_factory=dict)
    negation_levels: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require_text("name", self.name)
        if self.tokenizer_fingerprint is not None:
            _require_text("tokenizer_fingerprint", self.tokenizer_fingerprint)
        if self.vocab_size is not None:
            object.__setattr__(self, "vocab_size", _checked_size(self.vocab_size))
        if not isinstance(self.fit, Mapping):
            raise InvalidInputError(
                f"`fit` must be a dictionary of JSON values, not {type(self.fit).__name__}."
            )
        for levels in (self.levels, self.negation_levels):
            _require_levels(levels)

    def negated(self) -> "AttributeConfig":
        """Return the config of the negation."""
        return replace(
            self,
            name=f"~{self.name}",
            fit={},
            levels=self.negation_levels,
            negation_levels=self.levels,
        )

    def combined(self, operator: str, other: "AttributeConfig") -> "AttributeConfig":
        """Return the config of `self operator other`; refuse different vocabularies."""
        require_same_fingerprint(
            f"'{self.name}', combined with '{other.name}',",
            self.tokenizer_fingerprint,
            other.tokenizer_fingerprint,
        )
        same_tokenizer = self.tokenizer_fingerprint is not None is not other.tokenizer_fingerprint
        sizes = {self.vocab_size, other.vocab_size} - {None}
        # Models of one tokenizer may pad its vocabulary to different sizes.
        if len(sizes) > 1 and not same_tokenizer:
            raise InvalidInputError(
                f"'{self.name}' has a vocabulary of {self.vocab_size} tokens, but '{other.name}' "
                f"has {other.vocab_size}. Fit both with one tokenizer."
            )
        return AttributeConfig(
            f"({self.name} {operator} {other.name})",
            max((size for size in sizes if size is not None), default=None),
            self.tokenizer_fingerprint or other.tokenizer_fingerprint,
        )


def _require_text(name: str, value: object) -> None:
    """Raise unless a value is a string that can be written as UTF-8."""
    if not isinstance(value, str):
        raise InvalidInputError(f"`{name}` must be a string, not {type(value).__name__}.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(
            f"`{name}` cannot be written as UTF-8: {value[:40]!a}. Use another one."
        ) from error


def _checked_size(value: Any) -> int:
    """Return a vocabulary size as an int; accept integers of NumPy and PyTorch."""
    try:
        size = index(value)
    except TypeError:
        size = -1
    if size < 0 or isinstance(value, bool):
        raise InvalidInputError(f"`vocab_size` must be an integer of 0 or more, not {value!r:.40}.")
    return size


def _require_levels(levels: object) -> None:
    """Raise unless a value maps names to finite numbers above 0."""
    valid = isinstance(levels, Mapping) and all(
        isinstance(name, str)
        and isinstance(strength, int | float)
        and not isinstance(strength, bool)
        and 0 < strength < inf
        for name, strength in levels.items()
    )
    if not valid:
        raise InvalidInputError(
            f"`levels` must map names to strengths above 0, not {str(levels)[:40]!r}."
        )
