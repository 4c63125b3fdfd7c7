"""What a training run leaves on disk: metrics as it goes, and checkpoints to go on from."""

import json
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

from torch import Tensor

from foretrace import _io
from foretrace.errors import InvalidFileError

CHECKPOINT_FILE = "checkpoint.safetensors"
METRICS_FILE = "metrics.jsonl"


class Checkpoint(NamedTuple):
    """Where a run stood."""

    step: int
    tensors: dict[str, Tensor]


class Diary:
    """A run's folder. One file holds state and position together, so that they cannot disagree."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], minutes: float) -> None:
        self.checkpoint, self.metrics = folder / CHECKPOINT_FILE, folder / METRICS_FILE
        self.settings, self.minutes = json.loads(json.dumps(settings)), minutes
        self._saved_at = monotonic()

    def open(self) -> Checkpoint | None:
        """Find the last checkpoint, if there is one, and forget what was recorded after it."""
        if not self.checkpoint.exists():
            _io.write_lines(self.metrics, [])
            return None
        tensors, metadata = _io.read_tensors(self.checkpoint)
        found = json.loads(metadata.get("settings", "{}"))
        differing = sorted(
            key for key in {*found, *self.settings} if found.get(key) != self.settings.get(key)
        )
        if differing:
            changes = "; ".join(_change(key, found, self.settings) for key in differing)
            raise InvalidFileError(
                f"{self.checkpoint} comes from a run with other settings ({changes}). Use the same "
                f"settings to go on, or another folder, or remove it to start again."
            )
        if metadata.get("crc32") != _checksums(tensors):
            raise InvalidFileError(
                f"{self.checkpoint} is damaged: its checksum does not match. Remove it to start "
                f"the run again."
            )
        step = int(metadata["step"])
        rows = [row for row in _io.read_lines(self.metrics) if row["step"] <= step]
        _io.write_lines(self.metrics, rows)
        return Checkpoint(step, tensors)

    def record(self, progress: Mapping[str, Any]) -> None:
        """Add one step's figures."""
        _io.append_lines(self.metrics, [progress])

    def save(self, step: int, tensors: Mapping[str, Tensor], *, now: bool) -> None:
        """Write a checkpoint if it is time to, or `now`."""
        if now or monotonic() - self._saved_at >= 60 * self.minutes:
            metadata = {
                "step": str(step),
                "settings": json.dumps(self.settings),
                "crc32": _checksums(tensors),
            }
            _io.write_tensors(self.checkpoint, tensors, metadata)
            self._saved_at = monotonic()


def _checksums(tensors: Mapping[str, Tensor]) -> str:
    return " ".join(f"{name}:{_io.checksum(tensors[name])}" for name in sorted(tensors))


def _change(key: str, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    if key == "shards":
        return "the corpus has other shards"
    if key == "start":
        return "it started from another HMM"
    return f"{key} was {found.get(key)}, is {wanted.get(key)}"
