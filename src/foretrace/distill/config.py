"""Settings of a distillation: its size and what it costs, and how to run the language model."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from foretrace import _remote
from foretrace.distill.em.config import EMConfig
from foretrace.distill.em.distributed import launched_group
from foretrace.distill.em.e_step import BUFFER_ELEMENTS
from foretrace.distill.latent import LatentConfig
from foretrace.distill.sampling.llama_source import LlamaSource
from foretrace.distill.sampling.sample import SHARD_ROWS, SamplingConfig
from foretrace.distill.sampling.source import Reader, Source, tokenizer_options
from foretrace.distill.sampling.transformers_source import TransformersSource
from foretrace.distill.sampling.vllm_source import VLLMSource
from foretrace.errors import InvalidInputError
from foretrace.gguf import is_gguf

STARTS = ("latent", "random")
ENGINES = ("transformers", "vllm")
POSITIONS_PER_STATE = 256  # token positions to cluster for the latent start
MANY_SHARDS, FEW_SHARDS, LEAST_ROWS = 10_000, 16, 256  # bounds of the default shard size
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
        return min(self.sequences, -(-POSITIONS_PER_STATE * self.num_states // self.length))

    def costs(self, vocab_size: int) -> Costs:
        """Compute the disk and memory that the distillation needs.

        EM holds counts, the emission rows of a batch, and buffers.

        Args:
            vocab_size: The size of the language model's vocabulary.

        Returns:
            Bytes on disk and in memory, by stage.
        """
        states, length, dimensions = self.num_states, self.length, self.latent.dimensions
        table = FLOAT * states * (vocab_size + states + 1)
        token_bytes = 2 if vocab_size <= 1 << 16 else 4
        return Costs(
            corpus=self.sequences * length * token_bytes,
            hidden=self.read_rows * ((length + 1) * dimensions * HALF + 8 * length),
            table=table,
            latent_memory=28 * states * 2 * dimensions + table if self.read_rows else 0,
            em_memory=int(2.9 * table + BUFFERS * FLOAT * BUFFER_ELEMENTS),
        )


@dataclass(frozen=True)
class LMConfig:
    """Settings of the language model that an HMM is distilled from.

    Attributes:
        engine: The engine that samples: `"transformers"` or `"vllm"`. transformers computes the
            hidden states. llama.cpp does both for a GGUF file.
        dtype: The dtype of the model, or `"auto"`: bfloat16 where the hardware has it natively,
            else float16 on GPUs and float32 on CPUs.
        end_of_text: The token that begins and ends texts, if not the tokenizer's own.
        device: The device of transformers; vLLM chooses its devices itself.
        options: Further options of the engine, such as `tensor_parallel_size` or `max_num_seqs`.
        reader_options: Options of transformers to compute hidden states, such as `device_map`. By
            default, the options of the engine that transformers accepts too.

    Raises:
        InvalidInputError: If the engine is unknown.

    Example:
        >>> from foretrace.distill import LMConfig
        >>> LMConfig(device="cuda", end_of_text="<|endoftext|>").engine
        'transformers'
    """

    engine: str = "transformers"
    dtype: str = "auto"
    end_of_text: str | None = None
    device: str = "cpu"
    options: Mapping[str, Any] = field(default_factory=dict)
    reader_options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise InvalidInputError(
                f"There is no engine '{self.engine}'. Use {' or '.join(ENGINES)}."
            )

    def load_source(self, name: str, length: int, *, chat: bool = False) -> Source:
        """Load the LM to sample rows of `length` tokens.

        `name` is a folder, a hub id or a GGUF file. With `chat`, the rows are answers, which end
        where turns do.
        """
        if is_gguf(name):
            return self._load_llama(name, length, chat=chat)
        if self.engine == "transformers":
            return self.load_transformers(name, chat=chat)
        if launched_group().size > 1:
            raise InvalidInputError(
                "vLLM cannot sample under torchrun: it distributes over GPUs by itself. Sample "
                "first without torchrun, in one process or in several with separate GPUs "
                "(CUDA_VISIBLE_DEVICES). Then run the same command under torchrun to train."
            )
        # The prompts of chats are not part of the rows, and may be longer than them.
        options = dict(self.options) if chat else {"max_model_len": length + 1, **self.options}
        return VLLMSource.load(
            name, end_of_text_token=self.end_of_text, chat=chat, dtype=self.dtype, **options
        )

    def load_reader(self, name: str, length: int, *, chat: bool = False) -> Reader:
        """Load the LM to compute hidden states; as `load_source`."""
        if is_gguf(name):
            return self._load_llama(name, length, chat=chat)
        return self.load_transformers(name, chat=chat)

    def _load_llama(self, name: str, length: int, *, chat: bool) -> LlamaSource:
        if self.engine != "transformers":
            raise InvalidInputError(
                f"{name} is a GGUF file, from which llama.cpp samples, not {self.engine}. Use the "
                f"default engine, or the folder or hub id of the model."
            )
        return LlamaSource.load(
            name,
            length,
            end_of_text_token=self.end_of_text,
            chat=chat,
            device=self.device,
            **self.options,
        )

    def load_transformers(self, name: str, *, chat: bool = False) -> TransformersSource:
        """Load the LM with transformers, which can compute hidden states."""
        options = self.reader_options
        if options is None:
            same_engine = self.engine == "transformers"
            options = self.options if same_engine else tokenizer_options(self.options)
        return TransformersSource.load(
            name,
            end_of_text_token=self.end_of_text,
            chat=chat,
            dtype=self.dtype,
            device=self.device,
            **options,
        )


def require_disk(folder: Path, needed: int) -> None:
    """Raise an error if the disk has too little space; files in the folder count as free."""
    if _remote.is_remote(folder):
        return
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
