"""Distill an HMM from a language model: sample a corpus, build a start, train, write the result.

Every stage writes its result to `out/work` atomically. After an interruption, the same call runs
the remaining work. Concurrent calls share the work.
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
from foretrace.chat import Prompt
from foretrace.distill import card
from foretrace.distill.clustering import require_faiss
from foretrace.distill.config import DistillConfig, LMConfig, require_disk
from foretrace.distill.em.config import CHECKPOINT_FILE, FREE_SETTINGS, METRICS_FILE, Progress
from foretrace.distill.em.distributed import ProcessGroup, process_group
from foretrace.distill.em.measures import context_gain
from foretrace.distill.em.train import train
from foretrace.distill.latent import LatentStart
from foretrace.distill.sampling.corpus import MANIFEST_FILE, SHARD_GLOB, Corpus, ShardSplit
from foretrace.distill.sampling.sample import are_chats, manifest_settings, sample
from foretrace.distill.sampling.source import public_name
from foretrace.distill.sampling.work_claims import POLL_SECONDS, claim_work, share_work
from foretrace.errors import InvalidFileError
from foretrace.hmm import HMM
from foretrace.hmm.storage import CONFIG_FILE, TENSOR_FILE
from foretrace.vocabulary import require_same_fingerprint


class StageProgress(NamedTuple):
    """The progress of one stage of a distillation.

    Attributes:
        stage: The name of the stage.
        done: Units of work that are done.
        total: Units of work in the stage.
        unit: The name of the unit.
        note: A remark to show with the progress.
    """

    stage: str
    done: int
    total: int
    unit: str
    note: str = ""


Observer = Callable[[StageProgress], None]


def distill(
    model: str,
    config: DistillConfig | None = None,
    *,
    out: str | os.PathLike[str],
    prompts: Sequence[Prompt] = (),
    lm: LMConfig | None = None,
    on_progress: Observer | None = None,
) -> HMM:
    """Distill an HMM from a causal language model, and write it with a model card.

    If the call is interrupted, repeat it to continue. Several processes, also on several machines
    with a common file system, can make the same call to share the work.

    Args:
        model: The language model: a folder or a hub id.
        config: The settings of the distillation.
        out: The folder for the HMM, its model card and its metrics. Intermediate files are in its
            subfolder `work`.
        prompts: Texts that a share of the sequences continue; or chats, lists of messages, that
            all sequences answer through the tokenizer's chat template.
        lm: The settings of the language model.
        on_progress: Called with the progress of every stage.

    Returns:
        The HMM.

    Raises:
        InvalidInputError: If the model cannot be loaded, or the disk has too little space.
        InvalidFileError: If `out` holds files of a distillation with other settings.

    Example:
        >>> hmm = ft.distill(
        ...     "HuggingFaceTB/SmolLM2-135M",
        ...     ft.DistillConfig(num_states=1024, sequences=100_000),
        ...     out="my-hmm",
        ... )  # doctest: +SKIP
    """
    distillation = _Distillation(
        model, config or DistillConfig(), Path(out), prompts, lm or LMConfig(), on_progress
    )
    return distillation.run()


class _Distillation:
    """One distillation: its settings, its folders, its stages."""

    def __init__(
        self,
        model: str,
        config: DistillConfig,
        out: Path,
        prompts: Sequence[Prompt],
        lm: LMConfig,
        on_progress: Observer | None,
    ) -> None:
        self.model, self.config, self.out = model, config, out
        self.prompts, self.lm = prompts, lm
        self.on_progress = on_progress or (lambda progress: None)
        self.work = out / "work"
        self.result = out / TENSOR_FILE

    def run(self) -> HMM:
        """Run the stages that are not complete."""
        if not self.result.exists():
            if self.config.start == "latent":
                require_faiss()  # fail now, not after days of sampling
            corpus = self._sample()
            split = corpus.split(self.config.em.held_out)
            start = self._build_start(corpus, split)
            with process_group(self.lm.device) as group:
                self._train_once(corpus, split, start, group)
        hmm = HMM.from_pretrained(self.out)
        self._require_same_settings(hmm, self.out, asdict(self.config))
        return hmm

    def _require_same_settings(self, hmm: HMM, folder: Path, wanted: Mapping[str, Any]) -> None:
        """Check that an existing HMM was distilled with the settings of this call."""
        if "settings" not in hmm.config.distillation:
            raise InvalidFileError(
                f"{folder} holds an HMM that was not distilled here. Use another --out."
            )
        existing = {**hmm.config.distillation["settings"], "model": hmm.config.source_model}
        expected = {**json.loads(json.dumps(wanted)), "model": public_name(self.model)}
        for settings in (existing, expected):
            for stage in ("em", "latent"):
                nested = settings.pop(stage, {}).items()
                settings |= {f"{stage}.{k}": v for k, v in nested if k not in FREE_SETTINGS}
        _require_equal(folder, "made", existing, expected)

    def _sample(self) -> Corpus:
        """Sample the corpus, unless it is complete."""
        folder, config = self.work / "corpus", self.config.sampling
        if (folder / MANIFEST_FILE).exists():
            corpus = Corpus(folder)
            if all(corpus.shard_path(shard).exists() for shard in range(config.shards)):
                self._require_same_sampling(corpus)
                return corpus
        chat = are_chats(self.prompts)
        source = self.lm.load_source(self.model, config.length, chat=chat)
        require_disk(self.out, self.config.costs(source.vocab_size).disk)

        def report(_rows: int) -> None:
            shards = len(list(folder.glob(SHARD_GLOB)))  # also of other workers
            rows = min(shards * config.shard_rows, config.sequences)
            self.on_progress(StageProgress("sampling", rows, config.sequences, "rows"))

        corpus = sample(folder, source, config, self.prompts, report)
        source.close()
        return corpus

    def _require_same_sampling(self, corpus: Corpus) -> None:
        expected = manifest_settings(self.config.sampling, self.prompts)
        expected |= {"length": self.config.length, "model": public_name(self.model)}
        manifest = corpus.manifest
        existing = {**manifest.sampling, "length": manifest.length, "model": manifest.source_model}
        _require_equal(corpus.folder, "drawn", existing, expected)

    def _build_start(self, corpus: Corpus, split: list[ShardSplit]) -> Path:
        """Build the HMM that EM starts from, unless it exists; return its folder."""
        folder = self.work / "start"
        settings = {key: asdict(self.config)[key] for key in ("num_states", "start", "latent")}
        latent = None
        if self.config.start == "latent":
            config = self.config
            hidden = self.work / "hidden" / _rows_digest(split, config.seed)
            latent = LatentStart(
                corpus, split, config.num_states, config.read_rows, config.latent, hidden
            )

        def build(_number: int, _path: Path) -> None:
            if latent is None:
                hmm = self._random_start(corpus)
            else:
                hmm = latent.build_hmm(latent.cluster(self._observer("clustering", "passes")))
            _with_facts(hmm, {"settings": settings}).save_pretrained(folder)

        exists = (folder / TENSOR_FILE).exists
        if latent is not None and not exists() and not latent.complete:
            self._compute_hidden_states(corpus, latent, exists)
        share_work([folder / TENSOR_FILE], build)
        self._require_same_settings(HMM.from_pretrained(folder), folder, settings)
        if latent is not None:
            latent.remove_files()
        return folder

    def _random_start(self, corpus: Corpus) -> HMM:
        ends = corpus.manifest.eos_token_ids
        vocab, seed = corpus.manifest.vocab_size, self.config.seed
        hmm = HMM.random(self.config.num_states, vocab, eos_token_id=ends, seed=seed)
        config = replace(hmm.config, source_model=corpus.manifest.source_model)
        return HMM(hmm.initial, hmm.transition, hmm.emission, config)

    def _compute_hidden_states(
        self, corpus: Corpus, latent: LatentStart, until: Callable[[], bool]
    ) -> None:
        """Compute hidden states together with other workers, until the start exists."""
        chat = are_chats(self.prompts)
        reader = self.lm.load_reader(self.model, self.config.length, chat=chat)
        require_same_fingerprint(
            "The corpus", corpus.manifest.tokenizer_fingerprint, reader.tokenizer_fingerprint
        )
        on_progress = self._observer("reading", "files")
        latent.compute_hidden_states(reader.hidden, on_progress, until=until)
        reader.close()

    def _observer(self, stage: str, unit: str) -> Callable[[int, int], None]:
        return lambda done, total: self.on_progress(StageProgress(stage, done, total, unit))

    def _train_once(
        self, corpus: Corpus, split: list[ShardSplit], start: Path, group: ProcessGroup
    ) -> None:
        """Train, or wait for the worker that does; processes of torchrun train together."""
        while not group.run_on_leader(self.result.exists):
            with claim_work(self.result) if group.is_leader else nullcontext(False) as claimed:
                if group.run_on_leader(lambda claimed=claimed: claimed):  # type: ignore[misc]
                    self._train(corpus, split, start, group)
                    continue
            time.sleep(POLL_SECONDS)

    def _train(
        self, corpus: Corpus, split: list[ShardSplit], start: Path, group: ProcessGroup
    ) -> None:
        hmm = train(
            HMM.from_pretrained(start).to(self.lm.device, self.config.em.accumulator_dtype),
            corpus,
            self.config.em,
            folder=self.work / "em",
            on_progress=self._observe_step,
        )
        group.run_on_leader(lambda: self._write_result(hmm, corpus.held_out(split)))

    def _observe_step(self, progress: Progress) -> None:
        note = f"{progress.log_likelihood:.4f} nats/token"
        if progress.held_out is not None:
            note += f", held-out {progress.held_out:.4f}"
        self.on_progress(StageProgress("EM", progress.step, progress.steps, "steps", note))

    def _write_result(self, hmm: HMM, held_out: Tensor) -> None:
        """Write metrics, card and curve, and last the HMM, which marks the result as complete."""
        gain = context_gain(hmm, held_out)
        facts: dict[str, Any] = {"settings": asdict(self.config)}
        if gain:
            facts["memory_gain"] = {str(ahead): nats for ahead, nats in gain.items()}
        hmm = _with_facts(hmm, facts)
        metrics = _io.read_lines(self.work / "em" / METRICS_FILE)
        _io.write_lines(self.out / METRICS_FILE, metrics)
        card.write(self.out, hmm, metrics)
        hmm.save_pretrained(self.out)
        (self.work / "em" / CHECKPOINT_FILE).unlink(missing_ok=True)


def _with_facts(hmm: HMM, facts: Mapping[str, Any]) -> HMM:
    """Return the HMM with further entries in its `config.distillation`."""
    config = replace(hmm.config, distillation={**hmm.config.distillation, **facts})
    return HMM(hmm.initial, hmm.transition, hmm.emission, config)


def _require_equal(
    folder: Path, verb: str, existing: Mapping[str, Any], expected: Mapping[str, Any]
) -> None:
    """Raise an error if a folder was written with other settings."""
    differing = sorted(key for key in expected if expected[key] != existing.get(key))
    if differing:
        raise InvalidFileError(
            f"{folder} was {verb} with other settings: {', '.join(differing)} differ. Use the same "
            f"settings or another --out, or remove it and run again."
        )


def _rows_digest(split: list[ShardSplit], seed: int) -> str:
    """Identify the rows that hidden states are computed of, by the shards and the seed."""
    shards = [[item.shard.path.name, item.shard.crc32, item.held_out_rows] for item in split]
    return sha256(json.dumps([seed, shards]).encode()).hexdigest()[:16]


def publish(out: str | os.PathLike[str], repository: str) -> str:
    """Upload a distilled HMM with its card, curve and metrics to the hub.

    Args:
        out: The folder of the HMM.
        repository: The repository on the hub, such as `"you/your-hmm"`.

    Returns:
        The address of the repository.

    Raises:
        InvalidInputError: If the upload fails.
    """
    files = (CONFIG_FILE, TENSOR_FILE, METRICS_FILE, card.CARD_FILE, card.CURVE_FILE)
    return _io.publish(Path(out), repository, files)
