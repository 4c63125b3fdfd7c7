"""What is known about an HMM beside its tables, and how it stands in `config.json`."""

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
    """Where an HMM comes from and what it belongs to."""

    eos_token_ids: tuple[int, ...] = ()
    """Ids that end a text; the HMM's last state then emits them for ever."""
    tokenizer_fingerprint: str | None = None
    """`foretrace.fingerprint` of the vocabulary that the token ids belong to."""
    source_model: str | None = None
    """Name of the LM that the HMM was distilled from."""
    distillation: Mapping[str, Any] = field(default_factory=dict)
    """How it was distilled: sequences, length, epochs, seed, figures."""
    sparsification: Mapping[str, float] | None = None
    """What `HMM.sparsify` cost, if it was applied."""

    def to_json(self) -> dict[str, Any]:
        """Give the fields as JSON can hold them."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any], where: str) -> Self:
        """Read the fields from a `config.json`; unknown keys warn, other versions are refused."""
        version = content.get("format_version")
        if type(version) is not int or version != FORMAT_VERSION:
            raise InvalidFileError(
                f"{where} has format version {version!r}, but this foretrace reads version "
                f"{FORMAT_VERSION}. {_advice(version)}"
            )
        known = {entry.name for entry in fields(cls)}
        unknown = sorted(set(content) - known - LAYOUT_KEYS)
        if unknown:
            warnings.warn(f"{where}: ignored unknown keys {', '.join(unknown)}", stacklevel=3)
        values = {key: value for key, value in content.items() if key in known}
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
        "FOLDER; else save it again."
    )
