"""Settings of EM, the metrics of its steps, and the checkpoints of a run."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from foretrace import _io
from foretrace.distill.em.measures import Baselines
from foretrace.errors import InvalidFileError, InvalidInputError

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
CHECKPOINT_FILE = "checkpoint.safetensors"
METRICS_FILE = "metrics.jsonl"

FREE_SETTINGS = ("checkpoint_minutes", "evaluations")
"""Settings that do not change the result: a run can resume with other values."""


@dataclass(frozen=True)
class EMConfig:
    """Settings of mini-batch EM.

    Attributes:
        epochs: Passes over the training rows.
        batch_size: Sequences per step, over all processes.
        first_step: Step size of the first step, in [0, 1].
        last_step: Step size that the schedule falls to, linearly. A `first_step` and `last_step` of
            1, with a batch of the whole corpus, is plain EM.
        pseudocount: Added to every expected count, in units of one token of the whole corpus.
        dtype: Dtype of the matrix products: `"float64"`, `"float32"` or `"bfloat16"`. Sums are
            float32 at least.
        seed: Seed of the order of the rows.
        held_out: Sequences that are not trained on, to measure the likelihood on.
        evaluations: Number of measurements, spread over the run.
        checkpoint_minutes: Minutes between checkpoints.

    Raises:
        InvalidInputError: If a setting is out of range.

    Example:
        >>> from foretrace.distill import EMConfig
        >>> config = EMConfig(epochs=10, batch_size=1024)
        >>> config.steps_per_epoch(10_000)
        10
    """

    epochs: int = 50
    batch_size: int = 4096
    first_step: float = 1.0
    last_step: float = 0.0
    pseudocount: float = 1e-3
    dtype: str = "float32"
    seed: int = 0
    held_out: int = 4096
    evaluations: int = 20
    checkpoint_minutes: float = 10.0

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch_size < 1 or self.evaluations < 1:
            raise InvalidInputError("epochs, batch_size and evaluations must be at least 1.")
        if not 0 <= self.last_step <= self.first_step <= 1:
            raise InvalidInputError(
                f"The step size must fall within [0, 1], but goes from {self.first_step} to "
                f"{self.last_step}."
            )
        if not 0 <= self.pseudocount < inf or self.dtype not in DTYPES:
            raise InvalidInputError(
                f"pseudocount must be a finite number of at least 0, and dtype one of "
                f"{', '.join(DTYPES)}, but they are {self.pseudocount} and {self.dtype}."
            )

    @property
    def accumulator_dtype(self) -> torch.dtype:
        """The dtype of tables and sums."""
        return torch.float64 if self.dtype == "float64" else torch.float32

    def steps_per_epoch(self, rows: int) -> int:
        """Return the number of batches in an epoch of so many training rows."""
        return -(-rows // self.batch_size)

    def step_size(self, fraction: float) -> float:
        """Return the step size when a fraction of the run is done, in [0, 1]."""
        return self.first_step + (self.last_step - self.first_step) * fraction


@dataclass(frozen=True)
class Progress:
    """The metrics of one EM step.

    Attributes:
        step: The number of this step, from 1.
        steps: The number of steps of the run.
        epoch: The epoch of this step, from 0.
        step_size: The step size.
        log_likelihood: Of the step's batch before the update, in nats per token.
        tokens: Tokens in the batch, without padding.
        seconds: Duration of the step.
        held_out: Log-likelihood of the held-out rows after the step, in nats per token; None in
            steps without a measurement.
        baselines: Log-likelihood of a unigram and a bigram model on the held-out rows; present
            where `held_out` is.
    """

    step: int
    steps: int
    epoch: int
    step_size: float
    log_likelihood: float
    tokens: int
    seconds: float
    held_out: float | None = None
    baselines: Baselines | None = None


class CheckpointFolder:
    """The folder of a run. One file holds tensors and step, so that they cannot disagree."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], minutes: float) -> None:
        self.checkpoint, self.metrics = folder / CHECKPOINT_FILE, folder / METRICS_FILE
        self.settings, self.minutes = json.loads(json.dumps(settings)), minutes
        self._saved_at = monotonic()
        self._rows: list[Mapping[str, Any]] = []

    def resume(self) -> tuple[int, dict[str, Tensor]]:
        """Return the step and the tensors of the last checkpoint; step 0 if there is none.

        The metrics of later steps are dropped.
        """
        if not self.checkpoint.exists():
            return 0, {}
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
        self._rows = [row for row in _io.read_lines(self.metrics) if row["step"] <= step]
        _io.write_lines(self.metrics, self._rows)
        return step, tensors

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Add the metrics of one step; they are written with the next checkpoint."""
        self._rows.append(metrics)

    def save(self, step: int, tensors: Mapping[str, Tensor], *, now: bool) -> None:
        """Write a checkpoint if `now`, or if the last one is older than `minutes`."""
        if now or monotonic() - self._saved_at >= 60 * self.minutes:
            metadata = {
                "step": str(step),
                "settings": json.dumps(self.settings),
                "crc32": _checksums(tensors),
            }
            _io.write_lines(self.metrics, self._rows)
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
