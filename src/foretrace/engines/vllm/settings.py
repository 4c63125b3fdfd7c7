"""What a server of steered requests is told, through the environment: it is several processes."""

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

    from foretrace.engines.token_bytes import Spelling
    from foretrace.engines.vllm.table_cache import Library

PREFIX = "FORETRACE_SERVE_"


@dataclass(frozen=True)
class Settings:
    """Where things are, and how much of them may be kept."""

    hmm: str
    """A folder, or a hub id."""
    attributes: str
    """The folder of the attributes' files; new ones are found without a restart."""
    tables: str = field(default_factory=gettempdir)
    """Where tables are put, in a folder of the user's own, for all processes on this machine."""
    horizon: int = 64
    memory_mb: int = 1024
    disk_mb: int = 8192
    body_mb: int = 32
    """Size of a request's body at most."""
    tokenizer: str = ""
    """That of the LM, a folder or a hub id: for requests that say what must occur or must not."""

    @classmethod
    def from_environment(cls) -> Self:
        """Read FORETRACE_SERVE_HMM, FORETRACE_SERVE_ATTRIBUTES and the others."""
        given = {
            each.name: os.environ[name]
            for each in fields(cls)
            if (name := PREFIX + each.name.upper()) in os.environ
        }
        if missing := [name for name in ("hmm", "attributes") if name not in given]:
            raise InvalidInputError(
                f"Set {PREFIX}{missing[0].upper()}, or start the server with `foretrace serve`."
            )
        whole = {"horizon", "memory_mb", "disk_mb", "body_mb"}
        try:
            return cls(**{k: int(v) if k in whole else v for k, v in given.items()})  # type: ignore[arg-type]
        except ValueError:
            raise InvalidInputError(f"{PREFIX}* must be whole numbers: {given}.") from None

    def to_environment(self) -> dict[str, str]:
        """Give the variables that say so."""
        return {PREFIX + each.name.upper(): str(getattr(self, each.name)) for each in fields(self)}


@cache
def open_library(device: "torch.device", observe: "Callable[[str, float], None]") -> "Library":
    """Load the HMM onto a device and open the folders, once in a process."""
    from foretrace.engines.vllm.table_cache import Library
    from foretrace.hmm import HMM

    settings = Settings.from_environment()
    folder = Path(settings.attributes)
    if not folder.is_dir():
        raise InvalidInputError(f"There is no folder {folder} of attributes. Check the spelling.")
    hmm = HMM.from_pretrained(settings.hmm).to(device)
    known = partial(_spelled, settings.tokenizer, hmm.config.tokenizer_fingerprint)
    return Library(
        hmm,
        folder,
        Path(settings.tables),
        horizon=settings.horizon,
        memory=settings.memory_mb << 20,
        disk=settings.disk_mb << 20,
        spelled=known if settings.tokenizer else None,
        observe=observe,
    )


def _spelled(source: str, expected: str | None) -> "Spelling":
    """Read what the tokens of the LM stand for; those of another tokenizer are refused."""
    from transformers import AutoTokenizer

    from foretrace.engines.token_bytes import Spelling
    from foretrace.vocabulary import require_same_fingerprint

    found = Spelling.of(AutoTokenizer.from_pretrained(source))
    require_same_fingerprint("The HMM", expected, found.tokenizer_fingerprint)
    return found
