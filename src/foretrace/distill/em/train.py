"""Train an HMM on a corpus by mini-batch EM, on one process or many, with exact resumption."""

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import islice
from math import isfinite
from pathlib import Path
from time import monotonic

import torch
from torch import Tensor

from foretrace import _io, _remote
from foretrace.distill.em.config import (
    DTYPES,
    FREE_SETTINGS,
    CheckpointFolder,
    EMConfig,
    Progress,
)
from foretrace.distill.em.distributed import ProcessGroup, current_group
from foretrace.distill.em.e_step import BatchCounts, EStep, Workspace, log_likelihood
from foretrace.distill.em.m_step import Counts
from foretrace.distill.em.measures import Baselines, ngram_baselines, text_mask
from foretrace.distill.sampling.corpus import Corpus, ShardSplit
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
    on_progress: Observer | None = None,
) -> HMM:
    """Train an HMM on a corpus by mini-batch EM.

    Under torchrun, call this inside `foretrace.distill.em.distributed.process_group`: each process
    then takes a share of every batch. The result does not depend on the number of processes, nor on
    interruptions, up to rounding.

    Args:
        start: The HMM to start from. Its vocabulary and end-of-text token must be the corpus's.
        corpus: The token sequences.
        config: The settings of EM.
        folder: Where to write metrics and checkpoints. If it holds a checkpoint of the same run,
            training resumes from it.
        on_progress: Called with the metrics after every step.

    Returns:
        The trained HMM. Its `config.distillation` holds the settings and the held-out
        log-likelihood.

    Raises:
        InvalidInputError: If the HMM does not fit the corpus, or the likelihood is not finite.
        TokenizerMismatchError: If the HMM and the corpus have different tokenizers.
        InvalidFileError: If the checkpoint is damaged or belongs to a run with other settings.

    Example:
        >>> from foretrace.distill import Corpus, EMConfig, Manifest, train
        >>> corpus = Corpus.create(folder / "train", Manifest(length=4, vocab_size=3))
        >>> _ = corpus.append(torch.tensor([[0, 1, 2, 0], [1, 2, 0, 1], [2, 0, 1, 2]]))
        >>> config = EMConfig(epochs=5, batch_size=3, held_out=0)
        >>> trained = train(ft.HMM.random(2, 3, seed=0), corpus, config)
        >>> trained.num_states, trained.config.distillation["steps"]
        (2, 5)
    """
    start_config = start.config
    run = _Run(
        start, corpus, config, None if folder is None else _remote.to_path(folder), current_group()
    )
    del start  # its tables are as large as the counts that were built from them
    for progress in run.steps():
        if on_progress is not None:
            on_progress(progress)
    return run.finish(start_config)


class _Run:
    """The state of a training run: counts, position in the corpus, and checkpoints."""

    def __init__(
        self,
        start: HMM,
        corpus: Corpus,
        config: EMConfig,
        folder: Path | None,
        group: ProcessGroup,
    ) -> None:
        self.corpus, self.config, self.group = corpus, config, group
        self.eos = _require_compatible(start, corpus)
        # The folder may change while processes start, so only the leader lists it.
        self.split = group.run_on_leader(lambda: corpus.split(config.held_out))
        self.rows = sum(shard.training_rows for shard in self.split)
        self.steps_per_epoch = config.steps_per_epoch(self.rows)
        self.total_steps = self.steps_per_epoch * config.epochs
        if config.pseudocount == 0 and self.steps_per_epoch > 1:
            raise InvalidInputError(
                "Mini-batches need a pseudocount: without one, a token that is not in the first "
                "batch stays impossible. Set a pseudocount, or a batch_size of the whole corpus."
            )
        self.held_out = corpus.held_out(self.split)
        self.counts = Counts.from_hmm(
            start,
            corpus.manifest.length,
            pseudocount=config.pseudocount / self.rows,
            ends=corpus.manifest.eos_token_ids,
        )
        self.e_step = EStep(
            start.num_states, corpus.manifest.length, DTYPES[config.dtype], self.counts.initial
        )
        self.workspace = Workspace(self.counts.initial)
        self.checkpoints: CheckpointFolder | None = None
        self.step = group.run_on_leader(lambda: self._resume(folder))
        self._broadcast_counts()
        self.last: Progress | None = None
        self.baselines = self._compute_baselines() if group.is_leader else None

    def _resume(self, folder: Path | None) -> int:
        """Load the last checkpoint, in the leader; return its step, or 0."""
        if folder is None:
            return 0
        settings = _checkpoint_settings(self.config, self.corpus, self.split, self.counts)
        self.checkpoints = CheckpointFolder(folder, settings, self.config.checkpoint_minutes)
        step, tensors = self.checkpoints.resume()
        if tensors:
            self.counts.restore(tensors)
        return step

    def _broadcast_counts(self) -> None:
        """Copy the leader's counts, which a checkpoint may have set, to all processes."""
        tensors = self.counts.tensors()
        for tensor in tensors.values():
            self.group.broadcast(tensor)
        self.counts.factor = float(tensors["factor"])

    def _compute_baselines(self) -> Baselines | None:
        if not len(self.held_out):
            return None
        num_batches = -(-BASELINE_SEQUENCES // self.config.batch_size)
        batches = islice(self._epoch(0, 0, (0, 1)), num_batches)
        return ngram_baselines(batches, self.held_out, self.corpus.manifest.vocab_size, self.eos)

    def steps(self) -> Iterator[Progress]:
        """Run the remaining steps."""
        evaluations = self.config.evaluations
        measured_steps = {self.total_steps * (n + 1) // evaluations for n in range(evaluations)}
        while self.step < self.total_steps:
            epoch, start = divmod(self.step, self.steps_per_epoch)
            started = monotonic()
            for batch in _io.read_ahead(
                self._epoch(epoch, start, (self.group.rank, self.group.size))
            ):
                progress = self._advance(batch, epoch, started)
                if self.step in measured_steps and (held_out := self._measure()) is not None:
                    progress = replace(progress, held_out=held_out, baselines=self.baselines)
                self.last = progress
                self._write(progress)
                yield progress
                started = monotonic()

    def _write(self, progress: Progress) -> None:
        if self.checkpoints is not None and self.group.is_leader:
            self.checkpoints.log(asdict(progress))
            last_step = self.step == self.total_steps
            self.checkpoints.save(self.step, self.counts.tensors(), now=last_step)

    def _epoch(self, epoch: int, start: int, part: tuple[int, int]) -> Iterator[Tensor]:
        size, seed = self.config.batch_size, self.config.seed
        return self.corpus.batches(self.split, size, seed=seed, epoch=epoch, start=start, part=part)

    def _advance(self, batch: Tensor, epoch: int, started: float) -> Progress:
        """Update the counts by one batch, of which this process holds a share."""
        counts = self.counts
        step_size = self.config.step_size(self.step / self.total_steps)
        tokens, index = self._distinct(batch.to(counts.emission.device))
        batch_counts = BatchCounts.zeros(len(tokens), len(counts.initial), self.workspace)
        self.e_step.accumulate(counts.parameters(tokens), index, batch_counts)
        batch_counts.summary[2] += text_mask(batch, self.eos).sum()
        self.group.all_reduce_sum(batch_counts.flat)
        total_log_likelihood, _, num_tokens = batch_counts.summary.tolist()
        if not isfinite(total_log_likelihood):
            raise InvalidInputError(
                f"The log-likelihood of step {self.step + 1} is {total_log_likelihood}. Use a "
                f"larger pseudocount, or float32 instead of bfloat16."
            )
        counts.update(tokens, batch_counts, step_size)
        self.step += 1
        return Progress(
            step=self.step,
            steps=self.total_steps,
            epoch=epoch,
            step_size=step_size,
            log_likelihood=total_log_likelihood / num_tokens,
            tokens=int(num_tokens),
            seconds=monotonic() - started,
        )

    def _distinct(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the (U,) tokens in the rows of all processes, and this process's indices in it."""
        present = torch.zeros(len(self.counts.emission), dtype=torch.uint8, device=rows.device)
        present[rows.flatten()] = 1
        self.group.all_reduce_max(present)
        index = present.cumsum(0, dtype=torch.long) - 1
        return present.nonzero()[:, 0], index[rows]

    def _measure(self) -> float | None:
        """Compute the held-out log-likelihood in nats per token."""
        if not len(self.held_out):
            return None
        rows = self.held_out.to(self.counts.emission.device)
        tokens, index = self._distinct(rows)
        parameters = self.counts.parameters(tokens)
        total = log_likelihood(parameters, self.group.local_rows(index)).sum()
        self.group.all_reduce_sum(total)
        return float(total) / int(text_mask(rows, self.eos).sum())

    def finish(self, start_config: HMMConfig) -> HMM:
        """Build the HMM, with the settings and results of the run in its config."""
        facts: dict[str, object] = {"sequences": self.rows, "steps": self.total_steps}
        facts |= asdict(self.config)
        held_out = self._measure() if self.last is None else self.last.held_out
        if held_out is not None:
            facts["held_out_log_likelihood"] = held_out
        if self.baselines is not None:
            facts |= {f"{name}_log_likelihood": v for name, v in asdict(self.baselines).items()}
        manifest, before = self.corpus.manifest, start_config.distillation
        if "steps" in before:  # a trained HMM, with results of another run
            before = {"start": before}
        config = HMMConfig(
            eos_token_ids=manifest.eos_token_ids,
            tokenizer_fingerprint=manifest.tokenizer_fingerprint,
            source_model=manifest.source_model,
            distillation={**before, **manifest.sampling, **facts},
        )
        return self.counts.to_hmm(config)


def _require_compatible(start: HMM, corpus: Corpus) -> int | None:
    """Check that an HMM and a corpus belong together; return the end-of-text token."""
    manifest = corpus.manifest
    if start.vocab_size != manifest.vocab_size:
        raise InvalidInputError(
            f"The HMM has {start.vocab_size} tokens and the corpus {manifest.vocab_size}. Start "
            f"from an HMM with the corpus's vocabulary."
        )
    require_same_fingerprint(
        "The starting HMM", start.config.tokenizer_fingerprint, manifest.tokenizer_fingerprint
    )
    if bool(manifest.eos_token_ids) != bool(start.config.eos_token_ids):
        raise InvalidInputError(
            f"The corpus has the end-of-text tokens {list(manifest.eos_token_ids)}, and the HMM "
            f"{list(start.config.eos_token_ids)}. Both must have some, because the HMM's last "
            f"state stands for the end of a text, or neither."
        )
    return manifest.eos_token_id


def _checkpoint_settings(
    config: EMConfig, corpus: Corpus, split: list[ShardSplit], counts: Counts
) -> dict[str, object]:
    """Return what a checkpoint depends on: a run resumes only if all of it is the same."""
    settings = {key: v for key, v in asdict(config).items() if key not in FREE_SETTINGS}
    start = [_io.checksum(table) for table in (counts.initial, counts.transition, counts.emission)]
    shards = [item.shard for item in split]
    return settings | {
        "states": len(counts.initial),
        "vocab_size": corpus.manifest.vocab_size,
        "length": corpus.manifest.length,
        "eos_token_id": corpus.manifest.eos_token_id,
        "other_ends": corpus.manifest.other_ends,
        "sums": dtype_name(counts.initial.dtype),
        "start": start,
        "shards": [[shard.path.name, shard.rows, shard.crc32] for shard in shards],
    }
