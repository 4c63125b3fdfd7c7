"""The work of the stages: functions that an executor calls here or on another machine."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from foretrace import _io
from foretrace.chat import Prompt
from foretrace.distill import card
from foretrace.distill.config import DistillConfig, LMConfig, require_disk
from foretrace.distill.em.config import CHECKPOINT_FILE, METRICS_FILE, Progress
from foretrace.distill.em.distributed import current_group
from foretrace.distill.em.measures import context_gain
from foretrace.distill.em.train import train
from foretrace.distill.executor import Produce
from foretrace.distill.latent import LatentStart
from foretrace.distill.sampling.corpus import Corpus
from foretrace.distill.sampling.sample import Sampler, are_chats
from foretrace.hmm import HMM
from foretrace.vocabulary import require_same_fingerprint


@contextmanager
def sampling(
    model: str, lm: LMConfig, config: DistillConfig, prompts: Sequence[Prompt], out: Path
) -> Iterator[Produce]:
    """Load the LM; yield a function that draws a shard of the corpus."""
    source = lm.load_source(model, config.length, chat=are_chats(prompts))
    try:
        require_disk(out, config.costs(source.vocab_size).disk)
        yield Sampler(out / "work" / "corpus", source, config.sampling, prompts).draw
    finally:
        source.close()


@contextmanager
def reading(model: str, lm: LMConfig, latent: LatentStart, *, chat: bool) -> Iterator[Produce]:
    """Load the LM; yield a function that writes a file of hidden states."""
    manifest = latent.corpus.manifest
    reader = lm.load_reader(model, manifest.length, chat=chat)
    try:
        require_same_fingerprint(
            "The corpus", manifest.tokenizer_fingerprint, reader.tokenizer_fingerprint
        )
        yield partial(latent.write, reader.hidden)
    finally:
        reader.close()


def training(
    config: DistillConfig, out: Path, device: str, on_progress: Callable[[Progress], None]
) -> None:
    """Train the HMM, as one process of a group; the leader writes the result."""
    work = out / "work"
    corpus = Corpus(work / "corpus")
    hmm = train(
        HMM.from_pretrained(work / "start").to(device, config.em.accumulator_dtype),
        corpus,
        config.em,
        folder=work / "em",
        on_progress=on_progress,
    )
    current_group().run_on_leader(lambda: _write_result(hmm, corpus, config, out))


def _write_result(hmm: HMM, corpus: Corpus, config: DistillConfig, out: Path) -> None:
    """Write metrics, card and curve, and last the HMM, which marks the result as complete."""
    gain = context_gain(hmm, corpus.held_out(corpus.split(config.em.held_out)))
    facts: dict[str, Any] = {"settings": asdict(config)}
    if gain:
        facts["memory_gain"] = {str(ahead): nats for ahead, nats in gain.items()}
    hmm = with_facts(hmm, facts)
    metrics = _io.read_lines(out / "work" / "em" / METRICS_FILE)
    _io.write_lines(out / METRICS_FILE, metrics)
    card.write(out, hmm, metrics)
    hmm.save_pretrained(out)
    (out / "work" / "em" / CHECKPOINT_FILE).unlink(missing_ok=True)


def with_facts(hmm: HMM, facts: Mapping[str, Any]) -> HMM:
    """Return the HMM with further entries in its `config.distillation`."""
    config = replace(hmm.config, distillation={**hmm.config.distillation, **facts})
    return HMM(hmm.initial, hmm.transition, hmm.emission, config)
