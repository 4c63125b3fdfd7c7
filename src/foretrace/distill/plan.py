"""What a distillation will take on this machine: a few seconds of each stage, multiplied."""

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from foretrace import _io
from foretrace.distill.config import DistillConfig
from foretrace.distill.costs import Costs, nearest_existing
from foretrace.distill.em.config import DTYPES
from foretrace.distill.em.e_step import BatchCounts, Expectation
from foretrace.distill.em.m_step import Counts
from foretrace.distill.em.workspace import Workspace
from foretrace.distill.lm_config import LMConfig
from foretrace.distill.sampling.sample import Beginnings
from foretrace.distill.start import kmeans
from foretrace.distill.start.basis import Basis
from foretrace.distill.start.latent import FILE_ROWS, before_end, vectors
from foretrace.hmm import HMM

FEW_SECONDS = 2.0  # how long to time what can be made as small as one likes
FORWARD_SHARE = 1 / 3  # of an E-step: measuring needs one of its three products
WRITTEN_ELEMENTS = 1 << 24  # to time the disk: 64 MB
TABLES_WRITTEN = 3  # the start, a checkpoint, the HMM; more checkpoints in long runs


class Stage(NamedTuple):
    """One stage: how long, and of what."""

    name: str
    seconds: float
    work: str


class Plan(NamedTuple):
    """What it will take."""

    stages: list[Stage]
    costs: Costs

    @property
    def seconds(self) -> float:
        """All stages together."""
        return sum(stage.seconds for stage in self.stages)


def plan(
    model: str,
    config: DistillConfig,
    *,
    prompts: Sequence[str] = (),
    lm: LMConfig | None = None,
    folder: str | Path = ".",
) -> Plan:
    """Time a little of each stage on this machine, and multiply. Writes nothing that stays.

    One process is assumed: workers that sample together share the time of the first two stages.
    """
    lm = lm or LMConfig()
    began = perf_counter()
    source = lm.source(model, config.length)
    loading = perf_counter() - began
    found = config.costs(source.vocab_size)
    rows, drawing = _sampling(
        source.draw, source.width, Beginnings(source, prompts, config.sampling)
    )
    source.close()
    stages = [
        Stage("load the LM", loading, lm.engine),
        Stage("sample", drawing * config.sequences, f"{config.sequences:,} sequences"),
    ]
    if config.start == "latent":
        began = perf_counter()
        reader = lm.reader(model)
        loading = perf_counter() - began
        stages += _latent(reader.hidden, rows, loading, reader.eos_token_id, config)
        reader.close()
    stages += _em(rows, config, lm.device)
    stages.append(_writing(Path(folder), found))
    return Plan(stages, found)


def _sampling(
    draw: Callable[[list[list[int]], int, int], Tensor], width: int, begin: Beginnings
) -> tuple[Tensor, float]:
    """Draw as many rows as the engine takes at once; give them, and the seconds of one."""
    config = begin.config
    prefixes = begin.of(0)[:width]
    draw(prefixes[:2], config.length, 0)  # the first call of all is slow
    began = perf_counter()
    rows = draw(prefixes, config.length, 1)
    return rows, (perf_counter() - began) / len(rows)


def _latent(
    read: Callable[[Tensor], Tensor], rows: Tensor, loading: float, eos: int, config: DistillConfig
) -> list[Stage]:
    few = rows[:FILE_ROWS]
    read(few[:2])
    began = perf_counter()
    hidden = read(few)
    reading = (perf_counter() - began) / len(few) * config.read_rows
    text = before_end(few, eos)
    basis = Basis.of(hidden[:, 1:][text], config.latent.dimensions)
    places = vectors(basis(hidden), text, config.latent.persistence)
    passes = config.latent.iterations + 1  # one more to count
    many = config.num_states - 1
    centroids = places[torch.randint(len(places), (many,))]
    kmeans.improve(lambda: [places[:100]], centroids)
    empty, full = (
        _seconds(lambda some=some: kmeans.improve(lambda: [some], centroids))  # type: ignore[misc]
        for some in (places[:1], places)
    )
    each = max(0.0, full - empty) / len(few)
    clustering = passes * (empty + each * config.read_rows)
    work = f"{config.read_rows:,} sequences"
    return [
        Stage("read hidden states", loading + reading, work),
        Stage("cluster them", clustering, f"{passes} passes"),
    ]


def _em(rows: Tensor, config: DistillConfig, device: str) -> list[Stage]:
    """Time steps on batches that grow until they take a few seconds; the last two tell the rest."""
    tokens, index = torch.unique(rows.to(device), return_inverse=True)
    step = _Step(config, len(tokens), device)
    size = min(16, len(rows))
    times: list[tuple[int, float]] = []
    while not times or (times[-1][1] < FEW_SECONDS and size <= len(rows)):
        times.append((size, _seconds(lambda: step.take(index[:size]))))  # noqa: B023
        size *= 2
    (few, short), (more, long) = times[-2] if len(times) > 1 else (0, 0.0), times[-1]
    each = max(0.0, long - short) / (more - few)
    fixed = max(0.0, short - few * each)
    em = config.em
    training = max(1, config.sequences - em.held_out)
    steps = em.epochs * em.steps_per_epoch(training)
    measuring = em.evaluations * em.held_out * each * FORWARD_SHARE
    seconds = steps * fixed + em.epochs * training * each + measuring
    return [Stage("train by EM", seconds, f"{steps:,} steps")]


class _Step:
    """A step of EM on a random HMM that knows only the tokens that occur: others cost nothing."""

    def __init__(self, config: DistillConfig, vocab_size: int, device: str) -> None:
        hmm = HMM.random(config.num_states, max(2, vocab_size), device=device)
        self.counts = Counts.from_hmm(hmm, config.length, pseudocount=1e-9, eos_token_id=None)
        self.expectation = Expectation(
            config.num_states, config.length, DTYPES[config.em.dtype], self.counts.initial
        )
        self.workspace = Workspace(self.counts.initial)

    def take(self, index: Tensor) -> None:
        tokens, place = torch.unique(index, return_inverse=True)
        new = BatchCounts.zeros(len(tokens), len(self.counts.initial), self.workspace)
        self.expectation.add(self.counts.parameters(tokens), place, new)
        self.counts.update(tokens, new, 0.5)
        float(self.counts.initial[0])  # wait for the device


def _writing(folder: Path, found: Costs) -> Stage:
    """Time the disk with a small file."""
    content = {"content": torch.zeros(WRITTEN_ELEMENTS)}
    with TemporaryDirectory(dir=nearest_existing(folder)) as scratch:
        seconds = _seconds(lambda: _io.write_tensors(Path(scratch) / "timed", content, {}))
    whole = TABLES_WRITTEN * found.table + found.hidden + found.corpus
    return Stage("write", seconds * whole / content["content"].nbytes, "to disk")


def _seconds(work: Callable[[], object]) -> float:
    began = perf_counter()
    work()
    return perf_counter() - began
