"""What to distil, and how: the settings of a whole distillation."""

from dataclasses import dataclass, field, replace

from foretrace.distill.costs import Costs, costs
from foretrace.distill.em.config import EMConfig
from foretrace.distill.sampling.sample import SHARD_ROWS, SamplingConfig
from foretrace.distill.start.latent import LatentConfig
from foretrace.errors import InvalidInputError

STARTS = ("latent", "random")
MANY_SHARDS, FEW_SHARDS, LEAST_ROWS = 10_000, 16, 256


@dataclass(frozen=True)
class DistillConfig:
    """What to distil, and how."""

    num_states: int = 4096
    sequences: int = 10_000_000
    length: int = 32
    """Tokens in a sequence."""
    prompted: float = 0.5
    """Share of the sequences that continue a prompt, if there are prompts."""
    start: str = "latent"
    """`latent`: latent variable distillation; or `random`."""
    latent: LatentConfig = field(default_factory=LatentConfig)
    em: EMConfig = field(default_factory=lambda: EMConfig(epochs=10))
    shard_rows: int | None = None
    """Sequences in a file, which a worker draws at once; chosen by the number of sequences."""
    seed: int = 0
    """Decides everything that is random, in all stages."""

    def __post_init__(self) -> None:
        if self.start not in STARTS:
            raise InvalidInputError(f"There is no start '{self.start}': {' or '.join(STARTS)}.")
        if self.num_states < 2:
            raise InvalidInputError(
                f"num_states is {self.num_states}, but the end of text needs a state of its own: "
                f"give at least 2."
            )
        if self.em.held_out >= self.sequences:
            raise InvalidInputError(
                f"{self.sequences} sequences leave nothing to train on when {self.em.held_out} are "
                f"held out: give more sequences, or a smaller --held-out."
            )
        if self.read_rows * self.length < self.num_states - 1 and self.start == "latent":
            raise InvalidInputError(
                f"{self.num_states} states cannot be found in {self.read_rows} sequences of "
                f"{self.length} tokens: give more sequences or fewer states."
            )
        if self.shard_rows is None:  # tens of thousands of files at most; some, to show progress
            rows = SHARD_ROWS * max(1, self.sequences // (SHARD_ROWS * MANY_SHARDS))
            rows = min(rows, max(LEAST_ROWS, self.sequences // FEW_SHARDS))
            object.__setattr__(self, "shard_rows", rows)
        object.__setattr__(self, "latent", replace(self.latent, seed=self.seed))
        object.__setattr__(self, "em", replace(self.em, seed=self.seed))
        self.sampling  # noqa: B018  its own checks

    @property
    def sampling(self) -> SamplingConfig:
        """What to draw."""
        return SamplingConfig(
            sequences=self.sequences,
            length=self.length,
            prompted=self.prompted,
            shard_rows=self.shard_rows or SHARD_ROWS,
            seed=self.seed,
        )

    @property
    def read_rows(self) -> int:
        """Rows that the LM reads to find a start."""
        if self.start == "random":
            return 0
        return min(self.sequences, self.latent.rows(self.num_states, self.length))

    def costs(self, vocab_size: int) -> Costs:
        """Count what it takes in bytes."""
        return costs(
            states=self.num_states,
            vocab_size=vocab_size,
            sequences=self.sequences,
            length=self.length,
            read_rows=self.read_rows,
            dimensions=self.latent.dimensions,
        )
