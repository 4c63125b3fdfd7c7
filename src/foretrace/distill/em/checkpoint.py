"""Checkpoints and metrics of a training run, in its folder."""

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
    """The state of a run after a step."""

    step: int
    tensors: dict[str, Tensor]


class CheckpointFolder:
    """The folder of a run. One file holds tensors and step, so that they cannot disagree."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], minutes: float) -> None:
        self.checkpoint, self.metrics = folder / CHECKPOINT_FILE, folder / METRICS_FILE
        self.settings, self.minutes = json.loads(json.dumps(settings)), minutes
        self._saved_at = monotonic()

    def resume(self) -> Checkpoint | None:
        """Read the last checkpoint, if there is one, and drop the metrics of later steps."""
        if not self.checkpoint.exists():
            _io.write_lines(self.metrics, [])
            return None
        tensors, metadata = _io.read_tensors(self.checkpoint)
        saved = json.loads(metadata.get("settings", "{}"))
        differing = sorted(
            key for key in {*saved, *self.settings} if saved.get(key) != self.settings.get(key)
        )
        if differing:
            changes = "; ".join(_describe_change(key, saved, self.settings) for key in differing)
            raise InvalidFileError(
                f"{self.checkpoint} comes from a run with other settings ({changes}). Use the same "
                f"settings to resume, or use another folder, or remove it to start again."
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

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Append the metrics of one step."""
        _io.append_lines(self.metrics, [metrics])

    def save(self, step: int, tensors: Mapping[str, Tensor], *, now: bool) -> None:
        """Write a checkpoint if `now`, or if the last one is older than `minutes`."""
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


def _describe_change(key: str, saved: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    if key == "shards":
        return "the corpus has other shards"
    if key == "start":
        return "it started from another HMM"
    return f"{key} was {saved.get(key)}, is {current.get(key)}"
