"""Likelihood and context gain of HMMs by the start of EM.

For each number of states: a random start and latent variable distillation, with the same number of
EM steps on one corpus of SmolLM2. Set FORETRACE_CORPUS to the corpus (`work/corpus` of a
distillation) and FORETRACE_SCRATCH to a folder for hidden states and
checkpoints, from which an interrupted run resumes. With --quick, a small corpus is sampled first.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from torch import Tensor

from foretrace import _io
from foretrace.distill import Corpus, EMConfig, LatentConfig, train
from foretrace.distill.config import POSITIONS_PER_STATE
from foretrace.distill.em.measures import context_gain, text_mask
from foretrace.distill.latent import LatentStart
from foretrace.distill.sampling.sample import SamplingConfig, sample
from foretrace.distill.sampling.transformers_source import TransformersSource
from foretrace.hmm import HMM
from harness import Options, Report, options
from smollm2 import find_smollm2

STARTS = ("random", "latent")
EPOCHS = 2
FIRST_HMM = {1: 1.7, 2: 1.85, 4: 1.86, 8: 1.86, 16: 1.85}
"""Gain of an early HMM (512 states, random start, 24,000 sequences), to exceed at 1,024 states."""


@dataclass(frozen=True)
class Cell:
    """The settings of one HMM."""

    states: int
    start: str
    shards: int


def cells(arguments: Options, shards: int) -> Iterator[Cell]:
    """List the HMMs: by states and start, and by the share of the corpus that EM reads."""
    small, middle, large = (8, 16, 32) if arguments.quick else (256, 1024, 2048)
    for states in (small, middle):
        for start in STARTS:
            yield Cell(states, start, shards)
    for start in ("random", "latent"):
        yield Cell(large, start, shards)
    for divisor in (8, 3):
        yield Cell(middle, "latent", max(2, shards // divisor))


def main() -> None:
    """Train the HMMs that are missing, and print the report."""
    arguments = options(__doc__)
    report = Report("Held-out nats/token, and gain of the next k tokens from a prefix of 12")
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(os.environ.get("FORETRACE_SCRATCH", temporary))
        corpus = _corpus(arguments, scratch)
        for cell in cells(arguments, len(corpus.shards())):
            _measure(cell, corpus, scratch, arguments, report)
    report.publish(arguments.json)


def _corpus(arguments: Options, scratch: Path) -> Corpus:
    if not arguments.quick:
        return Corpus(os.environ["FORETRACE_CORPUS"])
    return small_corpus(scratch / "corpus")


def small_corpus(folder: Path) -> Corpus:
    """Sample a few short sequences from SmolLM2."""
    return sample(folder, _lm(), SamplingConfig(256, 18, shard_rows=32))


def _lm() -> TransformersSource:
    return TransformersSource.load(
        str(find_smollm2()), end_of_text_token="<|endoftext|>", dtype="auto"
    )


def _measure(cell: Cell, corpus: Corpus, scratch: Path, arguments: Options, report: Report) -> None:
    folder = scratch / f"{cell.states}-{cell.start}-{cell.shards}"
    figures = folder / "figures.json"
    if not figures.exists():
        _io.write_json(figures, _train(cell, corpus, folder, arguments))
    results = _io.read_json(figures)
    name = f"{cell.states} states, {cell.start}, {results['sequences']} sequences"
    report.add(f"{name}: before EM", results["before"], "nats/token")
    report.add(f"{name}: after EM", results["after"], "nats/token", at_least=results["bigram"])
    for ahead, nats in results["gain"].items():
        wanted = FIRST_HMM[int(ahead)] if (cell.states, cell.start) == (1024, "latent") else None
        report.add(f"{name}: gain of next {ahead}", nats, "nats", at_least=wanted)


def _train(cell: Cell, corpus: Corpus, folder: Path, arguments: Options) -> dict[str, object]:
    held_out, batch = (32, 64) if arguments.quick else (4096, 2048)
    rows = corpus.held_out(corpus.split(held_out))
    subset = _link_subset(corpus, cell.shards, folder.parent / f"corpus-{cell.shards}")
    # The same number of steps for every subset: EM reads fewer sequences more often.
    epochs = round(EPOCHS * len(corpus.shards()) / cell.shards)
    config = EMConfig(epochs=epochs, batch_size=batch, held_out=held_out)
    # All subsets have the start of the full corpus, so that only the rows of EM differ.
    start = _start(cell, corpus, held_out, folder.parent / "hidden")
    before = _nats(start, rows)
    hmm = train(start, subset, config, folder=folder)
    (folder / "checkpoint.safetensors").unlink()
    return {
        "sequences": sum(item.training_rows for item in subset.split(held_out)),
        "before": before,
        "after": _nats(hmm, rows),
        "bigram": hmm.config.distillation["bigram_log_likelihood"],
        "gain": {str(ahead): nats for ahead, nats in context_gain(hmm, rows).items()},
    }


def _link_subset(corpus: Corpus, shards: int, folder: Path) -> Corpus:
    """Link the first shards into a separate corpus.

    It holds out more rows of each shard than the full corpus does. So no HMM is trained on the
    held-out rows of the full corpus, on which all are measured.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in (
        corpus.folder / "corpus.json",
        *(shard.path for shard in corpus.shards()[:shards]),
    ):
        if not (folder / path.name).exists():
            (folder / path.name).symlink_to(path.resolve())
    return Corpus(folder)


def _start(cell: Cell, corpus: Corpus, held_out: int, hidden: Path) -> HMM:
    vocab, eos = corpus.manifest.vocab_size, corpus.manifest.eos_token_id
    if cell.start == "random":
        return HMM.random(cell.states, vocab, eos_token_id=eos, seed=0)
    rows = -(-POSITIONS_PER_STATE * cell.states // corpus.manifest.length)
    latent = LatentStart(corpus, corpus.split(held_out), cell.states, rows, LatentConfig(), hidden)
    if missing := latent.missing():
        lm = _lm()
        for number in missing:
            latent.write(lm.hidden, number)
    return latent.build_hmm(latent.cluster())


def _nats(hmm: HMM, rows: Tensor) -> float:
    (eos,) = hmm.config.eos_token_ids
    return float(hmm.log_likelihood(rows).double().sum()) / int(text_mask(rows, eos).sum())


if __name__ == "__main__":
    main()
