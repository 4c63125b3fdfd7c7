"""Mini-batch EM: an HMM from a corpus, on one process or many, interrupted and resumed at will."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from time import monotonic

import torch
from torch import Tensor

from foretrace.distill.baselines import Baselines, baselines, real_tokens
from foretrace.distill.corpus import Corpus, Split
from foretrace.distill.counts import Counts
from foretrace.distill.diary import Diary
from foretrace.distill.expectation import BatchCounts, Expectation, log_likelihood
from foretrace.distill.group import Group, current
from foretrace.distill.workspace import Workspace
from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM, HMMConfig
from foretrace.vocabulary import require_same_fingerprint

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
BASELINE_SEQUENCES = 1_000_000  # a unigram and a bigram of these are as good as of all


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
        if self.pseudocount < 0 or self.dtype not in DTYPES:
            raise InvalidInputError(
                f"pseudocount must not be negative, and dtype one of {', '.join(DTYPES)}; they are "
                f"{self.pseudocount} and {self.dtype}."
            )

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
    """What a unigram and a bigram of the corpus reach on the held-out rows; with `held_out`."""


Observer = Callable[[Progress], None]


def train(
    start: HMM,
    corpus: Corpus,
    config: EMConfig,
    *,
    folder: Path | None = None,
    observe: Observer | None = None,
) -> HMM:
    """Train an HMM on a corpus by mini-batch EM, from `start`.

    With a `folder`, metrics and checkpoints go there, and a run that was interrupted goes on from
    its last checkpoint. Under torchrun, inside `group.joined`, every process takes part.
    """
    run = _Run(start, corpus, config, folder, current())
    for progress in run.steps():
        if observe is not None:
            observe(progress)
    return run.finish(start)


class _Run:
    """One training run: counts, position in the corpus, and where both are kept."""

    def __init__(
        self, start: HMM, corpus: Corpus, config: EMConfig, folder: Path | None, group: Group
    ) -> None:
        self.corpus, self.config, self.group = corpus, config, group
        self.eos = _end_of_text(start, corpus)
        self.split = corpus.split(config.held_out)
        self.rows = sum(part.training for part in self.split)
        self.per_epoch = -(-self.rows // config.batch_size)
        self.total = self.per_epoch * config.epochs
        self.held_out = corpus.held_out(self.split)
        self.counts = Counts.from_hmm(
            start,
            corpus.manifest.length,
            pseudocount=config.pseudocount / self.rows,
            eos_token_id=self.eos,
        )
        wanted, sums = DTYPES[config.dtype], self.counts.initial.dtype
        self.expectation = Expectation(
            start.num_states,
            corpus.manifest.length,
            sums if wanted.itemsize > sums.itemsize else wanted,  # never wider than the sums
            self.counts.initial,
        )
        self.workspace = Workspace(self.counts.initial)
        self.step = 0
        self.last: Progress | None = None
        self.diary = None
        if folder is not None:
            self.diary = Diary(folder, _settings(config, self.split), config.checkpoint_minutes)
            self._resume(self.diary)
        self.baselines = self._count_baselines() if group.leads else None

    def _resume(self, diary: Diary) -> None:
        """Take up the last checkpoint; the leading process reads it for all."""
        step = torch.zeros((), dtype=torch.long, device=self.counts.emission.device)
        if self.group.leads and (found := diary.open()) is not None:
            self.counts.restore(found.tensors)
            step.fill_(found.step)
        self.group.follow(step)
        self.step = int(step)
        if self.step:
            state = self.counts.tensors()
            for tensor in state.values():
                self.group.follow(tensor)
            self.counts.factor = float(state["factor"])

    def _count_baselines(self) -> Baselines | None:
        if not len(self.held_out):
            return None
        few = islice(self._epoch(0, 0), -(-BASELINE_SEQUENCES // self.config.batch_size))
        return baselines(few, self.held_out, self.corpus.manifest.vocab_size, self.eos)

    def steps(self) -> Iterator[Progress]:
        """Go through what is left of the run."""
        every = self.config.evaluations
        measured = {self.total * (turn + 1) // every for turn in range(every)}
        while self.step < self.total:
            epoch, start = divmod(self.step, self.per_epoch)
            for batch in self._epoch(epoch, start):
                progress = self._advance(batch, epoch)
                if self.step in measured and (held_out := self._measure()) is not None:
                    progress = replace(progress, held_out=held_out, baselines=self.baselines)
                self.last = progress
                self._write(progress)
                yield progress

    def _write(self, progress: Progress) -> None:
        if self.diary is not None and self.group.leads:
            self.diary.record(asdict(progress))
            self.diary.save(self.step, self.counts.tensors(), now=self.step == self.total)

    def _epoch(self, epoch: int, start: int) -> Iterator[Tensor]:
        return self.corpus.batches(
            self.split, self.config.batch_size, seed=self.config.seed, epoch=epoch, start=start
        )

    def _advance(self, batch: Tensor, epoch: int) -> Progress:
        """Learn from one batch."""
        began = monotonic()
        counts, config = self.counts, self.config
        step_size = config.step_size(self.step / self.total)
        batch = batch.to(counts.emission.device)
        tokens, index = torch.unique(batch, return_inverse=True)
        new = BatchCounts.zeros(len(tokens), len(counts.initial), self.workspace)
        self.expectation.add(counts.parameters(tokens), self.group.part(index), new)
        self.group.add_up(new.flat)
        counts.update(tokens, new, step_size)
        self.step += 1
        spoken = int(real_tokens(batch, self.eos).sum())
        return Progress(
            step=self.step,
            steps=self.total,
            epoch=epoch,
            step_size=step_size,
            log_likelihood=float(new.summary[0]) / spoken,
            tokens=spoken,
            seconds=monotonic() - began,
        )

    def _measure(self) -> float | None:
        """Give the held-out log-likelihood in nats per token."""
        if not len(self.held_out):
            return None
        rows = self.held_out.to(self.counts.emission.device)
        tokens, index = torch.unique(rows, return_inverse=True)
        found = log_likelihood(self.counts.parameters(tokens), self.group.part(index)).sum()
        self.group.add_up(found)
        return float(found) / int(real_tokens(rows, self.eos).sum())

    def finish(self, start: HMM) -> HMM:
        """Make the HMM, and say in its config how it came about."""
        done: dict[str, object] = {"sequences": self.rows, "steps": self.total}
        done |= asdict(self.config)
        if self.last is not None and self.last.held_out is not None:
            done["held_out_log_likelihood"] = self.last.held_out
        if self.baselines is not None:
            done |= {f"{name}_log_likelihood": v for name, v in asdict(self.baselines).items()}
        manifest = self.corpus.manifest
        config = HMMConfig(
            eos_token_ids=start.config.eos_token_ids,
            tokenizer_fingerprint=manifest.tokenizer_fingerprint,
            source_model=manifest.source_model,
            distillation={**start.config.distillation, **manifest.sampling, **done},
        )
        return self.counts.to_hmm(config)


def _end_of_text(start: HMM, corpus: Corpus) -> int | None:
    """Check that an HMM and a corpus belong together; give the token that ends a text."""
    manifest = corpus.manifest
    if start.vocab_size != manifest.vocab_size:
        raise InvalidInputError(
            f"The HMM has {start.vocab_size} tokens and the corpus {manifest.vocab_size}. Start "
            f"from an HMM with the corpus's vocabulary."
        )
    require_same_fingerprint(
        "The starting HMM", start.config.tokenizer_fingerprint, manifest.tokenizer_fingerprint
    )
    eos = manifest.eos_token_id
    if (() if eos is None else (eos,)) != start.config.eos_token_ids:
        raise InvalidInputError(
            f"Texts of the corpus end with {eos}, those of the HMM with "
            f"{list(start.config.eos_token_ids)}. Start from an HMM with the same end of text."
        )
    return eos


def _settings(config: EMConfig, split: list[Split]) -> dict[str, object]:
    """Name what a checkpoint depends on: a run goes on only with the same."""
    settings = asdict(config)
    for free in ("checkpoint_minutes", "evaluations"):
        del settings[free]
    settings["shards"] = [[part.shard.path.name, part.shard.rows] for part in split]
    return settings
