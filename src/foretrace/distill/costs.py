"""Disk and memory that a distillation needs, computed from its settings."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from foretrace.distill.em.e_step import BUFFER_ELEMENTS
from foretrace.errors import InvalidInputError

FLOAT = 4  # bytes per count
HALF = 2  # bytes per number of a hidden state
BUFFERS = 2.5  # of BUFFER_ELEMENTS in the E-step: all beliefs, and other buffers by stretches


@dataclass(frozen=True)
class Costs:
    """Bytes on disk and in memory, by stage.

    Attributes:
        corpus: The corpus on disk.
        hidden: Hidden states on disk; removed when the start is built.
        table: One dense HMM in float32.
        latent_memory: Memory to build the start: centroids, their sums, and the counts.
        em_memory: Memory of EM.
    """

    corpus: int
    hidden: int
    table: int
    latent_memory: int
    em_memory: int

    @property
    def disk(self) -> int:
        """The peak on disk: the corpus, with the hidden states or with three HMMs."""
        return self.corpus + max(self.hidden + self.table, 3 * self.table)


def costs(
    *, states: int, vocab_size: int, sequences: int, length: int, read_rows: int, dimensions: int
) -> Costs:
    """Compute the bytes: EM holds counts, the emission rows of a batch, and buffers."""
    table = FLOAT * states * (vocab_size + states + 1)
    token_bytes = 2 if vocab_size <= 1 << 16 else 4
    return Costs(
        corpus=sequences * length * token_bytes,
        hidden=read_rows * ((length + 1) * dimensions * HALF + 8 * length),
        table=table,
        latent_memory=28 * states * 2 * dimensions + table if read_rows else 0,
        em_memory=int(2.9 * table + BUFFERS * FLOAT * BUFFER_ELEMENTS),
    )


def require_disk(folder: Path, needed: int) -> None:
    """Raise an error if the disk has too little space; files in the folder count as free."""
    used = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
    free = shutil.disk_usage(nearest_existing(folder)).free
    if free + used < needed:
        raise InvalidInputError(
            f"{folder} needs {format_bytes(needed)} on disk, but has {format_bytes(free + used)}. "
            f"Free some space, choose another --out, or use fewer sequences or states."
        )


def nearest_existing(folder: Path) -> Path:
    """Return the folder, or its closest parent that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.is_dir())


def format_bytes(count: float) -> str:
    """Format a number of bytes in GB or MB."""
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
