"""What is known of an attribute beside its weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from foretrace.errors import InvalidInputError
from foretrace.vocabulary import require_same_fingerprint


@dataclass(frozen=True)
class AttributeConfig:
    """Its name, the vocabulary that its tokens are of, and how it was fitted."""

    name: str = "attribute"
    vocab_size: int | None = None
    tokenizer_fingerprint: str | None = None
    fit: Mapping[str, Any] = field(default_factory=dict)
    """How it was fitted, on what, and how well: plain JSON values."""

    def combined(self, sign: str, other: "AttributeConfig") -> "AttributeConfig":
        """Tell of `self sign other`; refuse if their token ids mean different words."""
        require_same_fingerprint(
            f"'{self.name}', beside '{other.name}',",
            self.tokenizer_fingerprint,
            other.tokenizer_fingerprint,
        )
        certain = self.tokenizer_fingerprint is not None is not other.tokenizer_fingerprint
        sizes = {self.vocab_size, other.vocab_size} - {None}
        if len(sizes) > 1 and not certain:  # one tokenizer may serve models of padded vocabularies
            raise InvalidInputError(
                f"'{self.name}' is of {self.vocab_size} tokens, '{other.name}' of "
                f"{other.vocab_size}. Fit both with one tokenizer."
            )
        return AttributeConfig(
            f"({self.name} {sign} {other.name})",
            max((size for size in sizes if size is not None), default=None),
            self.tokenizer_fingerprint or other.tokenizer_fingerprint,
        )
