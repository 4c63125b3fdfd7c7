"""From a language model's name to an HMM: sample, find a start, train, write it all down.

Every stage leaves its result in `out/work` under its final name only when it is whole. The same
call again, after whatever interruption, does what is left; several calls at once share the work.
"""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from foretrace import _io
from foretrace.distill import card
from foretrace.distill.config import DistillConfig
from foretrace.distill.context_gain import memory_gain
from foretrace.distill.costs import require_disk
from foretrace.distill.em.checkpoint import CHECKPOINT_FILE, METRICS_FILE
from foretrace.distill.em.config import FREE, Progress
from foretrace.distill.em.distributed import Group, joined
from foretrace.distill.em.train import train
from foretrace.distill.lm_config import LMConfig
from foretrace.distill.sampling.corpus import MANIFEST_FILE, SHARD_GLOB, Corpus, Split
from foretrace.distill.sampling.sample import manifest_settings, sample
from foretrace.distill.sampling.source import public_name
from foretrace.distill.sampling.work_claims import LOOK_SECONDS, claimed, share
from foretrace.distill.start.kmeans import require_faiss
from foretrace.distill.start.latent import Latents
from foretrace.errors import InvalidFileError
from foretrace.hmm import HMM
from foretrace.hmm.storage import CONFIG_FILE, TENSOR_FILE
from foretrace.vocabulary import require_same_fingerprint


class Advance(NamedTuple):
    """How far a stage is."""

    stage: str
    done: int
    total: int
    unit: str
    note: str = ""


Observer = Callable[[Advance], None]


def distill(
    model: str,
    config: DistillConfig | None = None,
    *,
    out: str | os.PathLike[str],
    prompts: Sequence[str] = (),
    lm: LMConfig | None = None,
    observe: Observer | None = None,
) -> HMM:
    """Distil an HMM from a causal LM, by folder or hub id, into the folder `out`."""
    distillation = _Distillation(
        model, config or DistillConfig(), Path(out), prompts, lm or LMConfig(), observe
    )
    return distillation.run()


class _Distillation:
    """One distillation: its settings, its folders, its stages."""

    def __init__(
        self,
        model: str,
        config: DistillConfig,
        out: Path,
        prompts: Sequence[str],
        lm: LMConfig,
        observe: Observer | None,
    ) -> None:
        self.model, self.config, self.out = model, config, out
        self.prompts, self.lm = prompts, lm
        self.observe = observe or (lambda advance: None)
        self.work = out / "work"
        self.result = out / TENSOR_FILE

    def run(self) -> HMM:
        """Do what is left to do."""
        if not self.result.exists():
            if self.config.start == "latent":
                require_faiss()  # better now than after days of sampling
            corpus = self._sample()
            split = corpus.split(self.config.em.held_out)
            start = self._start(corpus, split)
            with joined(self.lm.device) as group:
                self._train_once(corpus, split, start, group)
        hmm = HMM.from_pretrained(self.out)
        self._require_same(hmm, self.out, asdict(self.config))
        return hmm

    def _require_same(self, hmm: HMM, folder: Path, wanted: Mapping[str, Any]) -> None:
        """Insist that what is there was made as is wanted now."""
        if "settings" not in hmm.config.distillation:
            raise InvalidFileError(f"{folder} holds an HMM of another making. Use another --out.")
        found = {**hmm.config.distillation["settings"], "model": hmm.config.source_model}
        expected = {**json.loads(json.dumps(wanted)), "model": public_name(self.model)}
        for settings in (found, expected):
            em = settings.pop("em", {})
            settings |= {f"em.{key}": value for key, value in em.items() if key not in FREE}
        _require_equal(folder, "made", found, expected)

    def _sample(self) -> Corpus:
        """Draw the corpus, unless it is whole."""
        folder, config = self.work / "corpus", self.config.sampling
        if (folder / MANIFEST_FILE).exists():
            corpus = Corpus(folder)
            if all(corpus.shard_path(shard).exists() for shard in range(config.shards)):
                self._require_same_sampling(corpus)
                return corpus
        source = self.lm.source(self.model, config.length)
        needed = self.config.costs(source.vocab_size).disk
        require_disk(self.out, needed)

        def tell(_rows: int) -> None:
            shards = len(list(folder.glob(SHARD_GLOB)))  # others' too
            drawn = min(shards * config.shard_rows, config.sequences)
            self.observe(Advance("sampling", drawn, config.sequences, "rows"))

        corpus = sample(folder, source, config, self.prompts, tell)
        source.close()
        return corpus

    def _require_same_sampling(self, corpus: Corpus) -> None:
        wanted = manifest_settings(self.config.sampling, self.prompts)
        wanted |= {"length": self.config.length, "model": public_name(self.model)}
        manifest = corpus.manifest
        found = {**manifest.sampling, "length": manifest.length, "model": manifest.source_model}
        _require_equal(corpus.folder, "drawn", found, wanted)

    def _start(self, corpus: Corpus, split: list[Split]) -> Path:
        """Make the HMM that EM starts from, unless it is there; give its folder."""
        folder = self.work / "start"
        settings = {key: asdict(self.config)[key] for key in ("num_states", "start", "latent")}
        latents = None
        if self.config.start == "latent":
            config = self.config.latent
            hidden = self.work / "hidden" / _digest(split, config.seed)
            latents = Latents(corpus, split, self.config.num_states, config, hidden)

        def make(_number: int, _path: Path) -> None:
            if latents is None:
                hmm = self._random(corpus)
            else:
                hmm = latents.start(latents.cluster(self._teller("clustering", "passes")))
            _with_facts(hmm, {"settings": settings}).save_pretrained(folder)

        done = (folder / TENSOR_FILE).exists
        if latents is not None and not done() and not latents.complete:
            self._read(corpus, latents, done)
        share([folder / TENSOR_FILE], make)
        self._require_same(HMM.from_pretrained(folder), folder, settings)
        if latents is not None:
            latents.remove()
        return folder

    def _random(self, corpus: Corpus) -> HMM:
        eos = corpus.manifest.eos_token_id
        vocab, seed = corpus.manifest.vocab_size, self.config.seed
        hmm = HMM.random(self.config.num_states, vocab, eos_token_id=eos, seed=seed)
        config = replace(hmm.config, source_model=corpus.manifest.source_model)
        return HMM(hmm.initial, hmm.transition, hmm.emission, config)

    def _read(self, corpus: Corpus, latents: Latents, done: Callable[[], bool]) -> None:
        """Let the LM read, beside other workers, until all is read or even counted."""
        reader = self.lm.reader(self.model)
        require_same_fingerprint(
            "The corpus", corpus.manifest.tokenizer_fingerprint, reader.tokenizer_fingerprint
        )
        latents.read(reader.hidden, self._teller("reading", "files"), until=done)
        reader.close()

    def _teller(self, stage: str, unit: str) -> Callable[[int, int], None]:
        return lambda done, total: self.observe(Advance(stage, done, total, unit))

    def _train_once(self, corpus: Corpus, split: list[Split], start: Path, group: Group) -> None:
        """Train, or wait for whoever does; processes of torchrun train as one."""
        while not group.agree(self.result.exists):
            with claimed(self.result) if group.leads else nullcontext(False) as mine:
                if group.agree(lambda mine=mine: mine):  # type: ignore[misc]
                    self._train(corpus, split, start, group)
                    continue
            time.sleep(LOOK_SECONDS)

    def _train(self, corpus: Corpus, split: list[Split], start: Path, group: Group) -> None:
        hmm = train(
            HMM.from_pretrained(start).to(self.lm.device, self.config.em.sums),
            corpus,
            self.config.em,
            folder=self.work / "em",
            observe=self._tell_step,
        )
        group.agree(lambda: self._publish(hmm, corpus.held_out(split)))  # one writes, all wait

    def _tell_step(self, progress: Progress) -> None:
        note = f"{progress.log_likelihood:.4f} nats/token"
        if progress.held_out is not None:
            note += f", held-out {progress.held_out:.4f}"
        self.observe(Advance("EM", progress.step, progress.steps, "steps", note))

    def _publish(self, hmm: HMM, held_out: Tensor) -> None:
        """Write what others may read: card, curve and metrics first, the HMM last."""
        gain = memory_gain(hmm, held_out)
        facts: dict[str, Any] = {"settings": asdict(self.config)}
        if gain:
            facts["memory_gain"] = {str(ahead): nats for ahead, nats in gain.items()}
        told = _with_facts(hmm, facts)
        metrics = _io.read_lines(self.work / "em" / METRICS_FILE)
        _io.write_lines(self.out / METRICS_FILE, metrics)
        card.write(self.out, told, metrics)
        told.save_pretrained(self.out)
        (self.work / "em" / CHECKPOINT_FILE).unlink(missing_ok=True)


def _with_facts(hmm: HMM, facts: Mapping[str, Any]) -> HMM:
    """Say in an HMM's config how it was made."""
    config = replace(hmm.config, distillation={**hmm.config.distillation, **facts})
    return HMM(hmm.initial, hmm.transition, hmm.emission, config)


def _require_equal(
    folder: Path, how: str, found: Mapping[str, Any], wanted: Mapping[str, Any]
) -> None:
    """Refuse a folder if any of the wanted settings is another there."""
    differing = sorted(key for key in wanted if wanted[key] != found.get(key))
    if differing:
        raise InvalidFileError(
            f"{folder} was {how} with other settings: {', '.join(differing)} differ. Use the same, "
            f"or another --out, or remove it: it is then {how} again."
        )


def _digest(split: list[Split], seed: int) -> str:
    """Name the rows that are read: others must not be taken for them."""
    parts = [[part.shard.path.name, part.shard.crc32, part.held_out] for part in split]
    return sha256(json.dumps([seed, parts]).encode()).hexdigest()[:16]


def publish(out: str | os.PathLike[str], repository: str) -> str:
    """Upload a distilled HMM with its card, curve and metrics to the hub; give its address."""
    files = (CONFIG_FILE, TENSOR_FILE, METRICS_FILE, card.CARD_FILE, card.CURVE_FILE)
    return _io.publish(Path(out), repository, files)
