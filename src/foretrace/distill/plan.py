"""Estimate the time of a distillation on this machine by running each stage for a few seconds."""

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from foretrace import _io
from foretrace.chat import Prompt
from foretrace.distill.clustering import Basis, lloyd_step
from foretrace.distill.config import Costs, DistillConfig, LMConfig, nearest_existing
from foretrace.distill.em.config import DTYPES
from foretrace.distill.em.e_step import BatchCounts, EStep, Workspace
from foretrace.distill.em.m_step import Counts
from foretrace.distill.latent import (
    FILE_ROWS,
    HiddenStates,
    before_end_mask,
    feature_vectors,
)
from foretrace.distill.sampling.sample import Opening, Openings, are_chats
from foretrace.distill.sampling.source import Source
from foretrace.gguf import is_gguf
from foretrace.hmm import HMM

MEASURED_SECONDS = 2.0  # how long to time a stage whose batch size is free
FORWARD_SHARE = 1 / 3  # of an E-step: a measurement needs one of its three products
WRITTEN_ELEMENTS = 1 << 24  # to time the disk: 64 MB
TABLES_WRITTEN = 3  # the start, a checkpoint, the HMM; more checkpoints in long runs


class Stage(NamedTuple):
    """The estimate of one stage.

    Attributes:
        name: The name of the stage.
        seconds: Its duration.
        work: The amount of work, in words.
    """

    name: str
    seconds: float
    work: str


class Plan(NamedTuple):
    """The estimate of a distillation.

    Attributes:
        stages: The stages in order.
        costs: Bytes on disk and in memory.
    """

    stages: list[Stage]
    costs: Costs

    @property
    def seconds(self) -> float:
        """The duration of all stages together."""
        return sum(stage.seconds for stage in self.stages)


def plan(
    model: str,
    config: DistillConfig,
    *,
    prompts: Sequence[Prompt] = (),
    lm: LMConfig | None = None,
    folder: str | Path = ".",
    workers: int = 1,
) -> Plan:
    """Estimate the time, disk and memory of a distillation by timing a little of each stage.

    Workers divide sampling, hidden states and EM among them. The time that EM takes to add counts
    over the network is not part of the estimate. No file is left behind.

    Args:
        model: The language model: a folder or a hub id.
        config: The settings of the distillation.
        prompts: Texts that a share of the sequences continue, or chats that they answer.
        lm: The settings of the language model.
        folder: The output folder, or any folder on the same disk, to time the disk.
        workers: The number of workers, each like this machine.

    Returns:
        The duration of every stage, and the bytes on disk and in memory.

    Raises:
        InvalidInputError: If the model cannot be loaded.
    """
    lm = lm or LMConfig()
    started = perf_counter()
    chat = are_chats(prompts)
    source = lm.load_source(model, config.length, chat=chat)
    loading = perf_counter() - started
    costs = config.costs(source.vocab_size)
    openings = Openings(source, prompts, config.sampling)
    batch = openings.for_shard(0)[: source.batch_size]
    rows, row_seconds = _time_sampling(source, batch, config.length)
    source.close()
    sampling = row_seconds * config.sequences / workers
    stages = [
        Stage("load the LM", loading, "llama.cpp" if is_gguf(model) else lm.engine),
        Stage("sample", sampling, f"{config.sequences:,} sequences"),
    ]
    if config.start == "latent":
        started = perf_counter()
        reader = lm.load_reader(model, config.length, chat=chat)
        loading = perf_counter() - started
        contexts = [opening.context for opening in batch]
        stages += _time_latent_start(
            reader.hidden, rows, contexts, loading, reader.eos_token_id, config, workers
        )
        reader.close()
    stages.append(_time_em(rows, config, lm.device, workers))
    stages.append(_time_writing(Path() if "://" in str(folder) else Path(folder), costs))
    return Plan(stages, costs)


def _time_sampling(source: Source, batch: Sequence[Opening], length: int) -> tuple[Tensor, float]:
    """Sample one batch; return its rows, and the seconds per row."""
    contexts, prefixes = zip(*batch, strict=True)
    source.draw(prefixes[:2], length, 0, contexts[:2])  # warm up
    started = perf_counter()
    rows = source.draw(prefixes, length, 1, contexts)
    return rows, (perf_counter() - started) / len(rows)


def _time_latent_start(
    hidden_states: HiddenStates,
    rows: Tensor,
    contexts: Sequence[Sequence[int]],
    loading: float,
    eos: int,
    config: DistillConfig,
    workers: int,
) -> list[Stage]:
    rows, contexts = rows[:FILE_ROWS], contexts[:FILE_ROWS]
    hidden_states(rows[:2], contexts[:2])  # warm up
    started = perf_counter()
    hidden = hidden_states(rows, contexts)
    reading = (perf_counter() - started) / len(rows) * config.read_rows / workers
    mask = before_end_mask(rows, eos)
    basis = Basis.fit(hidden[:, 1:][mask], config.latent.dimensions)
    vectors = feature_vectors(basis(hidden), mask)
    passes = config.latent.iterations + 1  # one more to count
    centroids = vectors[torch.randint(len(vectors), (config.num_states - 1,))]
    lloyd_step(lambda: [vectors[:100]], centroids)  # warm up
    fixed, full = (
        _seconds(lambda block=block: lloyd_step(lambda: [block], centroids))  # type: ignore[misc]
        for block in (vectors[:1], vectors)
    )
    row_seconds = max(0.0, full - fixed) / len(rows)
    clustering = passes * (fixed + row_seconds * config.read_rows)
    return [
        Stage("read hidden states", loading + reading, f"{config.read_rows:,} sequences"),
        Stage("cluster them", clustering, f"{passes} passes"),
    ]


def _time_em(rows: Tensor, config: DistillConfig, device: str, workers: int) -> Stage:
    """Time steps of growing batch size, and extrapolate linearly from the last two."""
    tokens, index = torch.unique(rows.to(device), return_inverse=True)
    step = _EMStep(config, len(tokens), device)
    size = min(16, len(rows))
    times: list[tuple[int, float]] = []
    while not times or (times[-1][1] < MEASURED_SECONDS and size <= len(rows)):
        times.append((size, _seconds(lambda: step.run(index[:size]))))  # noqa: B023
        size *= 2
    (small, short), (large, long) = times[-2] if len(times) > 1 else (0, 0.0), times[-1]
    row_seconds = max(0.0, long - short) / (large - small)
    step_seconds = max(0.0, short - small * row_seconds)  # per step, independent of the batch
    em = config.em
    training = max(1, config.sequences - em.held_out)
    steps = em.epochs * em.steps_per_epoch(training)
    row_seconds /= workers
    measuring = em.evaluations * em.held_out * row_seconds * FORWARD_SHARE
    seconds = steps * step_seconds + em.epochs * training * row_seconds + measuring
    return Stage("train by EM", seconds, f"{steps:,} steps")


class _EMStep:
    """An EM step of a random HMM over the tokens that occur: other tokens cost nothing."""

    def __init__(self, config: DistillConfig, vocab_size: int, device: str) -> None:
        hmm = HMM.random(config.num_states, max(2, vocab_size), device=device)
        self.counts = Counts.from_hmm(hmm, config.length, pseudocount=1e-9)
        self.e_step = EStep(
            config.num_states, config.length, DTYPES[config.em.dtype], self.counts.initial
        )
        self.workspace = Workspace(self.counts.initial)

    def run(self, index: Tensor) -> None:
        tokens, batch_index = torch.unique(index, return_inverse=True)
        batch_counts = BatchCounts.zeros(len(tokens), len(self.counts.initial), self.workspace)
        self.e_step.accumulate(self.counts.parameters(tokens), batch_index, batch_counts)
        self.counts.update(tokens, batch_counts, 0.5)
        float(self.counts.initial[0])  # wait for the device


def _time_writing(folder: Path, costs: Costs) -> Stage:
    """Time the disk with a small file."""
    content = {"content": torch.zeros(WRITTEN_ELEMENTS)}
    with TemporaryDirectory(dir=nearest_existing(folder)) as scratch:
        seconds = _seconds(lambda: _io.write_tensors(Path(scratch) / "timed", content, {}))
    total = TABLES_WRITTEN * costs.table + costs.hidden + costs.corpus
    return Stage("write", seconds * total / content["content"].nbytes, "to disk")


def _seconds(work: Callable[[], object]) -> float:
    started = perf_counter()
    work()
    return perf_counter() - started
