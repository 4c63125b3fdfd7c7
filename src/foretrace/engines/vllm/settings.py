"""Settings of a server, passed in environment variables because a server has several processes."""

import os
from dataclasses import dataclass, field, fields
from functools import cache, partial
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Self

from foretrace.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from foretrace.engines.token_bytes import TokenBytes
    from foretrace.engines.vllm.builder import TableBuilder

PREFIX = "FORETRACE_SERVE_"


@dataclass(frozen=True)
class Settings:
    """Paths and budgets of a server."""

    hmm: str
    """A folder, or a hub id."""
    attributes: str
    """Folder of attribute files. New files are found without a restart."""
    tables: str = field(default_factory=gettempdir)
    """Parent of the folder for tables, which all processes of this machine's user share."""
    horizon: int = 64
    memory_mb: int = 1024
    disk_mb: int = 8192
    body_mb: int = 32
    """Largest body of a request."""
    tokenizer: str = ""
    """The LM's tokenizer, a folder or a hub id; needed for required and forbidden texts."""
    probe: str = ""
    """The LM's probe, a file; needed for attributes with a context reward."""

    @classmethod
    def from_environment(cls) -> Self:
        """Read FORETRACE_SERVE_HMM, FORETRACE_SERVE_ATTRIBUTES and the others."""
        values = {
            entry.name: os.environ[name]
            for entry in fields(cls)
            if (name := PREFIX + entry.name.upper()) in os.environ
        }
        if missing := [name for name in ("hmm", "attributes") if name not in values]:
            raise InvalidInputError(
                f"Set {PREFIX}{missing[0].upper()}, or start the server with `foretrace serve`."
            )
        integers = {entry.name for entry in fields(cls) if entry.type is int}
        try:
            return cls(**{k: int(v) if k in integers else v for k, v in values.items()})  # type: ignore[arg-type]
        except ValueError:
            raise InvalidInputError(
                f"These {PREFIX}* variables must be whole numbers: {', '.join(sorted(integers))}. "
                f"They are {values}."
            ) from None

    def to_environment(self) -> dict[str, str]:
        """Return the environment variables of these settings."""
        return {
            PREFIX + entry.name.upper(): str(getattr(self, entry.name)) for entry in fields(self)
        }


@cache
def open_builder(device: "torch.device", observe: "Callable[[str, float], None]") -> "TableBuilder":
    """Load the HMM onto a device and open the folders, once in each process."""
    from foretrace.context import Probe
    from foretrace.engines.vllm.builder import TableBuilder
    from foretrace.engines.vllm.table_store import TableStore
    from foretrace.hmm import HMM

    settings = Settings.from_environment()
    folder = Path(settings.attributes)
    if not folder.is_dir():
        raise InvalidInputError(f"There is no attribute folder {folder}. Check the spelling.")
    hmm = HMM.from_pretrained(settings.hmm).to(device)
    load = partial(_load_token_bytes, settings.tokenizer, hmm.config.tokenizer_fingerprint)
    return TableBuilder(
        hmm,
        folder,
        TableStore(settings.tables, settings.disk_mb << 20),
        horizon=settings.horizon,
        probe=Probe.load(settings.probe) if settings.probe else None,
        load_token_bytes=load if settings.tokenizer else None,
        observe=observe,
    )


def _load_token_bytes(source: str, expected: str | None) -> "TokenBytes":
    """Load the bytes of the LM's tokens, and refuse another tokenizer than the HMM's."""
    from transformers import AutoTokenizer

    from foretrace.engines.token_bytes import TokenBytes
    from foretrace.vocabulary import require_same_fingerprint

    token_bytes = TokenBytes.of(AutoTokenizer.from_pretrained(source))
    require_same_fingerprint("The HMM", expected, token_bytes.tokenizer_fingerprint)
    return token_bytes
