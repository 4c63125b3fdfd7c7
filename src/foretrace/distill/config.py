"""Settings of a distillation."""

from dataclasses import dataclass, field, replace

from foretrace.distill.costs import Costs, costs
from foretrace.distill.em.config import EMConfig
from foretrace.distill.sampling.sample import SHARD_ROWS, SamplingConfig
from foretrace.distill.start.latent import LatentConfig
from foretrace.errors import InvalidInputError

STARTS = ("latent", "random")
MANY_SHARDS, FEW_SHARDS, LEAST_ROWS = 10_000, 16, 256  # bounds of the default shard size


@dataclass(frozen=True)
class DistillConfig:
    """Settings of a distillation.

    Attributes:
        num_states: Hidden states of the HMM.
        sequences: Sequences to sample from the language model.
        length: Tokens per sequence.
        prompted: Share of the sequences that continue a prompt, if there are prompts.
        start: How to build the HMM that EM starts from: `"latent"`, by latent variable
            distillation, or `"random"`.
        latent: Settings of latent variable distillation.
        em: Settings of EM.
        shard_rows: Sequences per file of the corpus. A worker samples one file at a time. By
            default it follows from `sequences`.
        seed: Seed of all stages. It replaces the seeds of `latent` and `em`.

    Raises:
        InvalidInputError: If a setting is out of range, or the settings contradict each other.

    Example:
        >>> config = ft.DistillConfig(num_states=1024, sequences=100_000)
        >>> config.length, config.em.epochs
        (32, 10)
    """

    num_states: int = 4096
    sequences: int = 10_000_000
    length: int = 32
    prompted: float = 0.5
    start: str = "latent"
    latent: LatentConfig = field(default_factory=LatentConfig)
    em: EMConfig = field(default_factory=lambda: EMConfig(epochs=10))
    shard_rows: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.start not in STARTS:
            raise InvalidInputError(f"There is no start '{self.start}'. Use {' or '.join(STARTS)}.")
        if self.num_states < 2:
            raise InvalidInputError(
                f"num_states is {self.num_states}, but must be at least 2: one state is the end of "
                f"text."
            )
        if self.em.held_out >= self.sequences:
            raise InvalidInputError(
                f"{self.sequences} sequences leave nothing to train on when {self.em.held_out} are "
                f"held out. Use more sequences, or a smaller --held-out."
            )
        if self.read_rows * self.length < self.num_states - 1 and self.start == "latent":
            raise InvalidInputError(
                f"{self.num_states} states cannot be found in {self.read_rows} sequences of "
                f"{self.length} tokens. Use more sequences or fewer states."
            )
        if self.shard_rows is None:  # not too many files, but enough to show progress
            rows = SHARD_ROWS * max(1, self.sequences // (SHARD_ROWS * MANY_SHARDS))
            rows = min(rows, max(LEAST_ROWS, self.sequences // FEW_SHARDS))
            object.__setattr__(self, "shard_rows", rows)
        object.__setattr__(self, "latent", replace(self.latent, seed=self.seed))
        object.__setattr__(self, "em", replace(self.em, seed=self.seed))
        self.sampling  # noqa: B018  runs its checks

    @property
    def sampling(self) -> SamplingConfig:
        """The settings of the corpus."""
        return SamplingConfig(
            sequences=self.sequences,
            length=self.length,
            prompted=self.prompted,
            shard_rows=self.shard_rows or SHARD_ROWS,
            seed=self.seed,
        )

    @property
    def read_rows(self) -> int:
        """The number of rows whose hidden states are computed for the start."""
        if self.start == "random":
            return 0
        return min(self.sequences, self.latent.rows(self.num_states, self.length))

    def costs(self, vocab_size: int) -> Costs:
        """Compute the disk and memory that the distillation needs.

        Args:
            vocab_size: The size of the language model's vocabulary.

        Returns:
            Bytes on disk and in memory, by stage.
        """
        return costs(
            states=self.num_states,
            vocab_size=vocab_size,
            sequences=self.sequences,
            length=self.length,
            read_rows=self.read_rows,
            dimensions=self.latent.dimensions,
        )
