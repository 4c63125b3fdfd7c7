"""Mini-batch EM: an HMM from a corpus, on one process or many, interrupted and resumed at will."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from itertools import islice
from math import isfinite
from pathlib import Path
from time import monotonic

import torch
from torch import Tensor

from foretrace import _io
from foretrace.distill.em.checkpoint import Diary
from foretrace.distill.em.config import DTYPES, FREE, EMConfig, Progress
from foretrace.distill.em.distributed import Group, current
from foretrace.distill.em.e_step import BatchCounts, Expectation, log_likelihood
from foretrace.distill.em.m_step import Counts
from foretrace.distill.em.ngram import Baselines, baselines, real_tokens
from foretrace.distill.em.workspace import Workspace
from foretrace.distill.sampling.corpus import Corpus, Split
from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM, HMMConfig
from foretrace.hmm.probability import dtype_name
from foretrace.vocabulary import require_same_fingerprint

BASELINE_SEQUENCES = 1_000_000  # at most: counting all of a large corpus would take hours


Observer = Callable[[Progress], None]


def train(
    start: HMM,
    corpus: Corpus,
    config: EMConfig,
    *,
    folder: str | os.PathLike[str] | None = None,
    observe: Observer | None = None,
) -> HMM:
    """Train an HMM on a corpus by mini-batch EM, from `start`.

    With a `folder`, metrics and checkpoints go there, and a run that was interrupted goes on from
    its last checkpoint. Under torchrun, inside `group.joined`, every process takes part.
    """
    before = start.config
    run = _Run(start, corpus, config, None if folder is None else Path(folder), current())
    del start  # its tables are as large as the counts that were made of them
    for progress in run.steps():
        if observe is not None:
            observe(progress)
    return run.finish(before)


class _Run:
    """One training run: counts, position in the corpus, and where both are kept."""

    def __init__(
        self, start: HMM, corpus: Corpus, config: EMConfig, folder: Path | None, group: Group
    ) -> None:
        self.corpus, self.config, self.group = corpus, config, group
        self.eos = _end_of_text(start, corpus)
        # What is in the folder may change while processes start: one looks, for all.
        self.split = group.agree(lambda: corpus.split(config.held_out))
        self.rows = sum(part.training for part in self.split)
        self.per_epoch = config.steps_per_epoch(self.rows)
        self.total = self.per_epoch * config.epochs
        if config.pseudocount == 0 and self.per_epoch > 1:
            raise InvalidInputError(
                "Mini-batches need a pseudocount: without one, a token that is not in the first "
                "batch stays impossible. Give one, or a batch_size of the whole corpus."
            )
        self.held_out = corpus.held_out(self.split)
        self.counts = Counts.from_hmm(
            start,
            corpus.manifest.length,
            pseudocount=config.pseudocount / self.rows,
            eos_token_id=self.eos,
        )
        self.expectation = Expectation(
            start.num_states,
            corpus.manifest.length,
            DTYPES[config.dtype],
            self.counts.initial,
        )
        self.workspace = Workspace(self.counts.initial)
        self.diary: Diary | None = None
        self.step = group.agree(lambda: self._resume(folder))
        self._share_counts()
        self.last: Progress | None = None
        self.baselines = self._count_baselines() if group.leads else None

    def _resume(self, folder: Path | None) -> int:
        """Take up the last checkpoint, if there is one: the leading process, for all."""
        if folder is None:
            return 0
        settings = _settings(self.config, self.corpus, self.split, self.counts)
        self.diary = Diary(folder, settings, self.config.checkpoint_minutes)
        found = self.diary.open()
        if found is None:
            return 0
        self.counts.restore(found.tensors)
        return found.step

    def _share_counts(self) -> None:
        state = self.counts.tensors()
        for tensor in state.values():
            self.group.follow(tensor)
        self.counts.factor = float(state["factor"])

    def _count_baselines(self) -> Baselines | None:
        if not len(self.held_out):
            return None
        few = islice(self._epoch(0, 0, (0, 1)), -(-BASELINE_SEQUENCES // self.config.batch_size))
        return baselines(few, self.held_out, self.corpus.manifest.vocab_size, self.eos)

    def steps(self) -> Iterator[Progress]:
        """Go through what is left of the run."""
        every = self.config.evaluations
        measured = {self.total * (turn + 1) // every for turn in range(every)}
        while self.step < self.total:
            epoch, start = divmod(self.step, self.per_epoch)
            began = monotonic()
            for batch in _ahead(self._epoch(epoch, start, (self.group.rank, self.group.size))):
                progress = self._advance(batch, epoch, began)
                if self.step in measured and (held_out := self._measure()) is not None:
                    progress = replace(progress, held_out=held_out, baselines=self.baselines)
                self.last = progress
                self._write(progress)
                yield progress
                began = monotonic()

    def _write(self, progress: Progress) -> None:
        if self.diary is not None and self.group.leads:
            self.diary.record(asdict(progress))
            self.diary.save(self.step, self.counts.tensors(), now=self.step == self.total)

    def _epoch(self, epoch: int, start: int, part: tuple[int, int]) -> Iterator[Tensor]:
        size, seed = self.config.batch_size, self.config.seed
        return self.corpus.batches(self.split, size, seed=seed, epoch=epoch, start=start, part=part)

    def _advance(self, batch: Tensor, epoch: int, began: float) -> Progress:
        """Learn from one batch, of which this process holds a part."""
        counts = self.counts
        step_size = self.config.step_size(self.step / self.total)
        tokens, index = self._distinct(batch.to(counts.emission.device))
        new = BatchCounts.zeros(len(tokens), len(counts.initial), self.workspace)
        self.expectation.add(counts.parameters(tokens), index, new)
        new.summary[2] += real_tokens(batch, self.eos).sum()
        self.group.add_up(new.flat)
        likelihood, _, spoken = new.summary.tolist()
        if not isfinite(likelihood):
            raise InvalidInputError(
                f"The likelihood of step {self.step + 1} is {likelihood}. Use a larger "
                f"pseudocount, or float32 instead of bfloat16."
            )
        counts.update(tokens, new, step_size)
        self.step += 1
        return Progress(
            step=self.step,
            steps=self.total,
            epoch=epoch,
            step_size=step_size,
            log_likelihood=likelihood / spoken,
            tokens=int(spoken),
            seconds=monotonic() - began,
        )

    def _distinct(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Find the tokens that occur in any process's rows, (U,), and where in them ours stand."""
        marks = torch.zeros(len(self.counts.emission), dtype=torch.uint8, device=rows.device)
        marks[rows.flatten()] = 1
        self.group.any(marks)
        place = marks.cumsum(0, dtype=torch.long) - 1
        return marks.nonzero()[:, 0], place[rows]

    def _measure(self) -> float | None:
        """Give the held-out log-likelihood in nats per token."""
        if not len(self.held_out):
            return None
        rows = self.held_out.to(self.counts.emission.device)
        tokens, index = self._distinct(rows)
        found = log_likelihood(self.counts.parameters(tokens), self.group.part(index)).sum()
        self.group.add_up(found)
        return float(found) / int(real_tokens(rows, self.eos).sum())

    def finish(self, before: HMMConfig) -> HMM:
        """Make the HMM, and say in its config how it came about."""
        done: dict[str, object] = {"sequences": self.rows, "steps": self.total}
        done |= asdict(self.config)
        held_out = self._measure() if self.last is None else self.last.held_out
        if held_out is not None:
            done["held_out_log_likelihood"] = held_out
        if self.baselines is not None:
            done |= {f"{name}_log_likelihood": v for name, v in asdict(self.baselines).items()}
        manifest = self.corpus.manifest
        config = HMMConfig(
            eos_token_ids=before.eos_token_ids,
            tokenizer_fingerprint=manifest.tokenizer_fingerprint,
            source_model=manifest.source_model,
            distillation={**before.distillation, **manifest.sampling, **done},
        )
        return self.counts.to_hmm(config)


def _ahead(batches: Iterator[Tensor]) -> Iterator[Tensor]:
    """Read the next batch while this one is learnt from."""
    with ThreadPoolExecutor(1) as reader:
        coming = reader.submit(next, batches, None)
        while (batch := coming.result()) is not None:
            coming = reader.submit(next, batches, None)
            yield batch


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


def _settings(
    config: EMConfig, corpus: Corpus, split: list[Split], counts: Counts
) -> dict[str, object]:
    """Name what a checkpoint depends on: a run goes on only with the same."""
    settings = asdict(config)
    for free in FREE:
        del settings[free]
    start = [_io.checksum(table) for table in (counts.initial, counts.transition, counts.emission)]
    return settings | {
        "states": len(counts.initial),
        "vocab_size": corpus.manifest.vocab_size,
        "length": corpus.manifest.length,
        "eos_token_id": corpus.manifest.eos_token_id,
        "sums": dtype_name(counts.initial.dtype),
        "start": start,
        "shards": [[part.shard.path.name, part.shard.rows, part.shard.crc32] for part in split],
    }
