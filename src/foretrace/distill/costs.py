"""What a distillation needs in bytes: arithmetic alone, so that it can be told beforehand."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from foretrace.distill.em.e_step import BUFFER_ELEMENTS
from foretrace.errors import InvalidInputError

FLOAT = 4  # bytes of a count
HALF = 2  # bytes of a number of a hidden state
BUFFERS = 2.5  # of BUFFER_ELEMENTS in the E-step: beliefs whole, the others in stretches


@dataclass(frozen=True)
class Costs:
    """Bytes on disk and in memory, by stage."""

    corpus: int
    hidden: int
    """Hidden states on disk, gone once they are counted."""
    table: int
    """One HMM, dense, in float32."""
    latent_memory: int
    """Centroids with their sums, and the table that is counted into."""
    em_memory: int

    @property
    def disk(self) -> int:
        """The most that is on disk at once: corpus, then hidden states or start, and two HMMs."""
        return self.corpus + max(self.hidden + self.table, 3 * self.table)


def costs(
    *, states: int, vocab_size: int, sequences: int, length: int, read_rows: int, dimensions: int
) -> Costs:
    """Count bytes: EM holds counts, the rows of a batch's tokens, and working memory."""
    table = FLOAT * states * (vocab_size + states + 1)
    token = 2 if vocab_size <= 1 << 16 else 4
    return Costs(
        corpus=sequences * length * token,
        hidden=read_rows * ((length + 1) * dimensions * HALF + 8 * length),
        table=table,
        latent_memory=28 * states * 2 * dimensions + table if read_rows else 0,
        em_memory=int(2.9 * table + BUFFERS * FLOAT * BUFFER_ELEMENTS),
    )


def require_disk(folder: Path, needed: int) -> None:
    """Refuse to begin what the disk cannot hold; what the folder holds already is part of it."""
    held = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
    free = shutil.disk_usage(nearest_existing(folder)).free
    if free + held < needed:
        raise InvalidInputError(
            f"{folder} needs {gigabytes(needed)} on disk, but has {gigabytes(free + held)}. Free "
            f"some, choose another --out, or ask for fewer sequences or states."
        )


def nearest_existing(folder: Path) -> Path:
    """Find the folder, or the closest one above it that is there already."""
    return next(path for path in (folder, *folder.absolute().parents) if path.is_dir())


def gigabytes(count: float) -> str:
    """Write bytes for people."""
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
