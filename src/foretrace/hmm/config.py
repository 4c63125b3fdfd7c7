"""Metadata of an HMM, and its representation in `config.json`."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from reprlib import repr as shortened
from typing import Any, Self

from foretrace.errors import InvalidFileError

FORMAT_VERSION = 1
LAYOUT_KEYS = frozenset(
    {"format_version", "num_states", "vocab_size", "transition", "emission", "save_id"}
)


@dataclass(frozen=True)
class HMMConfig:
    """Metadata of an HMM: its origin and the tokenizer it belongs to.

    Attributes:
        eos_token_ids: End-of-text token ids. The last state of the HMM emits them and is absorbing.
        tokenizer_fingerprint: `foretrace.fingerprint` of the tokenizer's vocabulary.
        source_model: Name of the LM that the HMM was distilled from.
        distillation: Settings and metrics of the distillation: sequences, length, epochs, seed.
        sparsification: Settings and measured losses of `HMM.sparsify`, if it was applied.

    Example:
        >>> ft.HMMConfig(eos_token_ids=(0,), source_model="my-model").eos_token_ids
        (0,)
    """

    eos_token_ids: tuple[int, ...] = ()
    tokenizer_fingerprint: str | None = None
    source_model: str | None = None
    distillation: Mapping[str, Any] = field(default_factory=dict)
    sparsification: Mapping[str, float] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a dictionary for `config.json`.

        Example:
            >>> ft.HMMConfig(eos_token_ids=(0,)).to_json()["eos_token_ids"]
            (0,)
        """
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any], where: str) -> Self:
        """Read the fields from the content of a `config.json`. Unknown keys raise a warning.

        Args:
            content: The parsed file.
            where: Name of the file, for error messages.

        Returns:
            The metadata.

        Raises:
            InvalidFileError: The format version is another one, or a field has the wrong type.
        """
        version = content.get("format_version")
        if type(version) is not int or version != FORMAT_VERSION:
            raise InvalidFileError(
                f"{where} has format version {version!r}, but this foretrace reads version "
                f"{FORMAT_VERSION}. {_advice(version)}"
            )
        names = {entry.name for entry in fields(cls)}
        unknown = sorted(set(content) - names - LAYOUT_KEYS)
        if unknown:
            warnings.warn(f"{where}: ignored unknown keys {', '.join(unknown)}", stacklevel=3)
        values = {key: value for key, value in content.items() if key in names}
        for key, value in values.items():
            if not _IS_VALID[key](value):
                raise InvalidFileError(
                    f"{where} cannot be read: {key} is {shortened(value)}, which has the wrong "
                    f"type. Save it again."
                )
        return cls(**(values | {"eos_token_ids": tuple(values.get("eos_token_ids", ()))}))


def is_integer(value: object) -> bool:
    """Check that a JSON value is an integer; JSON's true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text_or_none(value: object) -> bool:
    return value is None or isinstance(value, str)


_IS_VALID: dict[str, Callable[[Any], bool]] = {
    "eos_token_ids": lambda value: isinstance(value, list) and all(map(is_integer, value)),
    "tokenizer_fingerprint": _is_text_or_none,
    "source_model": _is_text_or_none,
    "distillation": lambda value: isinstance(value, dict),
    "sparsification": lambda value: value is None or isinstance(value, dict),
}


def _advice(version: object) -> str:
    if isinstance(version, int) and version > FORMAT_VERSION:
        return "Upgrade foretrace: pip install -U foretrace."
    return (
        "If it is a checkpoint of TRACE or Ctrl-G, convert it: foretrace hmm convert SOURCE --out "
        "FOLDER. Otherwise save it again."
    )
