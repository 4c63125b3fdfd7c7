"""How to train by EM, and what a step of it comes to."""

from dataclasses import dataclass
from math import inf

import torch

from foretrace.distill.em.ngram import Baselines
from foretrace.errors import InvalidInputError

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


FREE = ("checkpoint_minutes", "evaluations")
"""Settings that change nothing in the result: a run may go on with others."""


@dataclass(frozen=True)
class EMConfig:
    """How to train."""

    epochs: int = 50
    batch_size: int = 4096
    """Sequences in a step, over all processes."""
    first_step: float = 1.0
    last_step: float = 0.0
    """The step size falls linearly; 1 and 1, with a batch of everything, is plain EM."""
    pseudocount: float = 1e-3
    """Added to every expected count, in units of one token of the whole corpus."""
    dtype: str = "float32"
    """What products run in; sums are float32 at least."""
    seed: int = 0
    held_out: int = 4096
    """Sequences that are not trained on, to measure on."""
    evaluations: int = 20
    """How often to measure, spread over the run."""
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
                f"pseudocount must be a number from 0 on, and dtype one of {', '.join(DTYPES)}; "
                f"they are {self.pseudocount} and {self.dtype}."
            )

    @property
    def sums(self) -> torch.dtype:
        """What tables and sums are held in."""
        return torch.float64 if self.dtype == "float64" else torch.float32

    def steps_per_epoch(self, rows: int) -> int:
        """How many batches that many training rows make."""
        return -(-rows // self.batch_size)

    def step_size(self, fraction: float) -> float:
        """Give the step size after a fraction of the run."""
        return self.first_step + (self.last_step - self.first_step) * fraction


@dataclass(frozen=True)
class Progress:
    """What one step came to."""

    step: int
    steps: int
    epoch: int
    step_size: float
    log_likelihood: float
    """Of the step's own batch, before learning from it: nats per token."""
    tokens: int
    seconds: float
    held_out: float | None = None
    """Of the held-out rows, after the step, where it was measured."""
    baselines: Baselines | None = None
    """What a unigram and a bigram reach on the held-out rows; given with `held_out`."""
