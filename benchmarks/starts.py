"""Where EM starts, and what the HMM then knows of the future: likelihood and memory gain.

For each number of states: a random start, latent variable distillation, and the same with
persistence, all with equally many steps of EM on one corpus of SmolLM2. Set FORETRACE_CORPUS to the
corpus (`work/corpus` of a distillation) and FORETRACE_SCRATCH to a folder for hidden states and
checkpoints: what was interrupted goes on from there. With --quick, a small corpus is drawn first.
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
from foretrace.distill.context_gain import memory_gain
from foretrace.distill.em.ngram import real_tokens
from foretrace.distill.sampling.sample import SamplingConfig, sample
from foretrace.distill.sampling.transformers_source import TransformersSource
from foretrace.distill.start.latent import Latents
from foretrace.hmm import HMM
from harness import Options, Report, options
from smollm2 import find_smollm2

STARTS = {"random": None, "latent": 0.0, "persistent": 1.0}
EPOCHS = 2
FIRST_HMM = {1: 1.7, 2: 1.85, 4: 1.86, 8: 1.86, 16: 1.85}
"""What a first HMM gained (512 states, random start, 24,000 sequences): to be beaten at 1,024."""


@dataclass(frozen=True)
class Cell:
    """One HMM to train."""

    states: int
    start: str
    shards: int


def cells(given: Options, shards: int) -> Iterator[Cell]:
    """List the HMMs: by states and start, and by how much of the corpus they are trained on."""
    small, middle, large = (8, 16, 32) if given.quick else (256, 1024, 2048)
    for states in (small, middle):
        for start in STARTS:
            yield Cell(states, start, shards)
    for start in ("random", "latent"):
        yield Cell(large, start, shards)
    for part in (8, 3):
        yield Cell(middle, "latent", max(2, shards // part))


def main() -> None:
    """Train what is not trained yet, and print all."""
    given = options(__doc__)
    report = Report("Held-out nats/token, and gain of the next k tokens from a prefix of 12")
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(os.environ.get("FORETRACE_SCRATCH", temporary))
        corpus = _corpus(given, scratch)
        for cell in cells(given, len(corpus.shards())):
            _measure(cell, corpus, scratch, given, report)
    report.publish(given.json)


def _corpus(given: Options, scratch: Path) -> Corpus:
    if not given.quick:
        return Corpus(os.environ["FORETRACE_CORPUS"])
    source = _lm()
    return sample(scratch / "corpus", source, SamplingConfig(256, 18, shard_rows=32))


def _lm() -> TransformersSource:
    return TransformersSource.load(
        str(find_smollm2()), end_of_text_token="<|endoftext|>", dtype="auto"
    )


def _measure(cell: Cell, corpus: Corpus, scratch: Path, given: Options, report: Report) -> None:
    folder = scratch / f"{cell.states}-{cell.start}-{cell.shards}"
    figures = folder / "figures.json"
    if not figures.exists():
        _io.write_json(figures, _train(cell, corpus, folder, given))
    found = _io.read_json(figures)
    name = f"{cell.states} states, {cell.start}, {found['sequences']} sequences"
    report.add(f"{name}: before EM", found["before"], "nats/token")
    report.add(f"{name}: after EM", found["after"], "nats/token", at_least=found["bigram"])
    for ahead, nats in found["gain"].items():
        wanted = FIRST_HMM[int(ahead)] if (cell.states, cell.start) == (1024, "latent") else None
        report.add(f"{name}: gain of next {ahead}", nats, "nats", at_least=wanted)


def _train(cell: Cell, corpus: Corpus, folder: Path, given: Options) -> dict[str, object]:
    held_out, batch = (32, 64) if given.quick else (4096, 2048)
    rows = corpus.held_out(corpus.split(held_out))
    part = _part(corpus, cell.shards, folder.parent / f"corpus-{cell.shards}")
    # Equally many steps whatever the part: fewer sequences are read more often.
    epochs = round(EPOCHS * len(corpus.shards()) / cell.shards)
    config = EMConfig(epochs=epochs, batch_size=batch, held_out=held_out, dtype="bfloat16")
    # The start is that of the whole corpus for all parts: what differs is what EM has read.
    begin = _start(cell, corpus, held_out, folder.parent / "hidden")
    before = _nats(begin, rows)
    hmm = train(begin, part, config, folder=folder)
    (folder / "checkpoint.safetensors").unlink()
    return {
        "sequences": sum(each.training for each in part.split(held_out)),
        "before": before,
        "after": _nats(hmm, rows),
        "bigram": hmm.config.distillation["bigram_log_likelihood"],
        "gain": {str(ahead): nats for ahead, nats in memory_gain(hmm, rows).items()},
    }


def _part(corpus: Corpus, shards: int, folder: Path) -> Corpus:
    """Link the first shards into a corpus of their own.

    It holds out more of each shard than the whole corpus does: all are measured on the whole
    corpus's held-out rows, and none has seen them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in (corpus.folder / "corpus.json", *(each.path for each in corpus.shards()[:shards])):
        if not (folder / path.name).exists():
            (folder / path.name).symlink_to(path.resolve())
    return Corpus(folder)


def _start(cell: Cell, corpus: Corpus, held_out: int, hidden: Path) -> HMM:
    vocab, eos = corpus.manifest.vocab_size, corpus.manifest.eos_token_id
    persistence = STARTS[cell.start]
    if persistence is None:
        return HMM.random(cell.states, vocab, eos_token_id=eos, seed=0)
    config = LatentConfig(persistence=persistence)
    latents = Latents(corpus, corpus.split(held_out), cell.states, config, hidden)
    if not latents.complete:
        latents.read(_lm().hidden)
    return latents.start(latents.cluster())


def _nats(hmm: HMM, rows: Tensor) -> float:
    (eos,) = hmm.config.eos_token_ids
    return float(hmm.log_likelihood(rows).double().sum()) / int(real_tokens(rows, eos).sum())


if __name__ == "__main__":
    main()
