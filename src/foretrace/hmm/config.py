"""What is known about an HMM beside its tables, and how it stands in `config.json`."""

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
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
        if version != FORMAT_VERSION:
            raise InvalidFileError(
                f"{where} has format version {version!r}, but this foretrace reads version "
                f"{FORMAT_VERSION}. {_advice(version)}"
            )
        known = {entry.name for entry in fields(cls)}
        unknown = sorted(set(content) - known - LAYOUT_KEYS)
        if unknown:
            warnings.warn(f"{where}: ignored unknown keys {', '.join(unknown)}", stacklevel=3)
        values = {key: value for key, value in content.items() if key in known}
        try:
            eos = tuple(int(token) for token in values.pop("eos_token_ids", ()))
            return cls(eos_token_ids=eos, **values)
        except (TypeError, ValueError) as error:
            raise InvalidFileError(f"{where} cannot be read ({error}). Save it again.") from error


def _advice(version: object) -> str:
    if isinstance(version, int) and version > FORMAT_VERSION:
        return "Upgrade foretrace: pip install -U foretrace."
    return (
        "If it is a checkpoint of TRACE or Ctrl-G, convert it: foretrace hmm convert SOURCE --out "
        "FOLDER; else save it again."
    )
