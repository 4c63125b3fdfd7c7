"""Distill an HMM from a language model: sample a corpus, build a start, train, write the result.

Every stage writes its result to `out/work` atomically. After an interruption, the same call runs
the remaining work.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from foretrace import _io, _remote
from foretrace.chat import Prompt
from foretrace.distill import card, stages
from foretrace.distill.clustering import require_faiss
from foretrace.distill.config import DistillConfig, LMConfig
from foretrace.distill.em.config import FREE_SETTINGS, METRICS_FILE, Progress
from foretrace.distill.em.distributed import ProcessGroup
from foretrace.distill.executor import Executor, Load, LocalExecutor
from foretrace.distill.latent import BASIS, LatentStart
from foretrace.distill.sampling.corpus import MANIFEST_FILE, Corpus, ShardSplit
from foretrace.distill.sampling.sample import are_chats, manifest_settings
from foretrace.distill.sampling.source import public_name
from foretrace.errors import InvalidFileError
from foretrace.hmm import HMM
from foretrace.hmm.storage import CONFIG_FILE, TENSOR_FILE


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
    executor: Executor | None = None,
    on_progress: Observer | None = None,
) -> HMM:
    """Distill an HMM from a causal language model, and write it with a model card.

    If the call is interrupted, repeat it to continue.

    Args:
        model: The language model: a folder or a hub id.
        config: The settings of the distillation.
        out: The folder for the HMM, its model card and its metrics, or a URL of an object store,
            such as `s3://bucket/my-hmm`. Intermediate files are in its subfolder `work`.
        prompts: Texts that a share of the sequences continue; or chats, lists of messages, that
            all sequences answer through the tokenizer's chat template.
        lm: The settings of the language model.
        executor: Where the stages run: by default in this process. A
            `foretrace.distill.ray_executor.RayExecutor` runs them on a Ray cluster.
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
    return _Distillation(
        model,
        config or DistillConfig(),
        _remote.to_path(out),
        prompts,
        lm or LMConfig(),
        executor or LocalExecutor(),
        on_progress or (lambda progress: None),
    ).run()


class _Distillation:
    """One distillation: its settings, its folders, its stages."""

    def __init__(
        self,
        model: str,
        config: DistillConfig,
        out: Path,
        prompts: Sequence[Prompt],
        lm: LMConfig,
        executor: Executor,
        on_progress: Observer,
    ) -> None:
        self.model, self.config, self.out = model, config, out
        self.prompts, self.lm = prompts, lm
        self.executor, self.on_progress = executor, on_progress
        self.work = out / "work"
        self.chat = are_chats(prompts)

    def run(self) -> HMM:
        """Run the stages that are not complete."""
        with self.executor.connect(self.lm.device) as group:
            if not group.run_on_leader((self.out / TENSOR_FILE).exists):
                if self.config.start == "latent":
                    require_faiss()  # fail now, not after days of sampling
                corpus = self._sample(group)
                self._build_start(corpus, corpus.split(self.config.em.held_out), group)
                train = partial(stages.training, self.config, self.out)
                self.executor.train(train, self.lm.device, self._observe_step)
        hmm = HMM.from_pretrained(self.out)
        self._require_same_settings(hmm, self.out, asdict(self.config))
        return hmm

    def _produce(
        self,
        stage: str,
        load: Load,
        folder: Path,
        total: int,
        parts: Sequence[tuple[Sequence[int], int]],
    ) -> None:
        """Produce shards in a folder, one part after the other.

        A part has the numbers of shards, and their tokens. The progress counts the tokens of all
        workers.
        """
        done = total - sum(tokens for _, tokens in parts)
        with self.executor.workers(stage, load) as produce:
            for shards, _ in parts:
                for tokens in produce(shards):
                    done = min(done + tokens, total)
                    self.on_progress(StageProgress(stage, done, total, "tokens"))
        _io.remove_partial_files(folder)

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

    def _sample(self, group: ProcessGroup) -> Corpus:
        """Sample the missing shards of the corpus."""
        folder, config = self.work / "corpus", self.config.sampling
        missing = group.run_on_leader(lambda: missing_shards(folder, config.shards))
        if missing:
            load = partial(
                stages.sampling, self.model, self.lm, self.config, self.prompts, self.out
            )
            rows = sum(map(config.rows, missing))
            total = config.sequences * config.length
            self._produce("sampling", load, folder, total, [(missing, rows * config.length)])
        corpus = Corpus(folder)
        self._require_same_sampling(corpus)
        return corpus

    def _require_same_sampling(self, corpus: Corpus) -> None:
        expected = manifest_settings(self.config.sampling, self.prompts)
        expected |= {"length": self.config.length, "model": public_name(self.model)}
        manifest = corpus.manifest
        existing = {**manifest.sampling, "length": manifest.length, "model": manifest.source_model}
        _require_equal(corpus.folder, "drawn", existing, expected)

    def _build_start(self, corpus: Corpus, split: list[ShardSplit], group: ProcessGroup) -> None:
        """Build the HMM that EM starts from, unless it exists."""
        folder, config = self.work / "start", self.config
        settings = {key: asdict(config)[key] for key in ("num_states", "start", "latent")}
        exists = group.run_on_leader((folder / TENSOR_FILE).exists)
        latent = None
        if config.start == "latent":
            hidden = self.work / "hidden" / _rows_digest(split, config.seed)
            latent = LatentStart(
                corpus, split, config.num_states, config.read_rows, config.latent, hidden
            )
            if not exists:
                self._read(latent, group.run_on_leader(latent.missing))

        def build() -> None:
            if latent is None:
                hmm = self._random_start(corpus)
            else:
                hmm = latent.build_hmm(latent.cluster(self._observer("clustering", "passes")))
            stages.with_facts(hmm, {"settings": settings}).save_pretrained(folder)

        if not exists:
            group.run_on_leader(build)
        self._require_same_settings(HMM.from_pretrained(folder), folder, settings)
        if latent is not None:
            group.run_on_leader(latent.remove_files)

    def _read(self, latent: LatentStart, missing: list[int]) -> None:
        """Compute the missing files of hidden states, after the basis that they share."""
        if missing:
            load = partial(stages.reading, self.model, self.lm, latent, chat=self.chat)
            files = [number for number in missing if number != BASIS]
            parts = [([BASIS], 0)] if BASIS in missing else []
            parts.append((files, sum(map(latent.tokens, files))))
            total = sum(map(latent.tokens, range(len(latent.pieces))))
            self._produce("reading", load, latent.folder, total, parts)

    def _random_start(self, corpus: Corpus) -> HMM:
        ends = corpus.manifest.eos_token_ids
        vocab, seed = corpus.manifest.vocab_size, self.config.seed
        hmm = HMM.random(self.config.num_states, vocab, eos_token_id=ends, seed=seed)
        config = replace(hmm.config, source_model=corpus.manifest.source_model)
        return HMM(hmm.initial, hmm.transition, hmm.emission, config)

    def _observer(self, stage: str, unit: str) -> Callable[[int, int], None]:
        return lambda done, total: self.on_progress(StageProgress(stage, done, total, unit))

    def _observe_step(self, progress: Progress) -> None:
        note = f"{progress.log_likelihood:.4f} nats/token"
        if progress.held_out is not None:
            note += f", held-out {progress.held_out:.4f}"
        self.on_progress(StageProgress("EM", progress.step, progress.steps, "steps", note))


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


def missing_shards(folder: Path, count: int) -> list[int]:
    """Return the shards of a corpus that are not sampled: all, if there is no corpus."""
    exists = (folder / MANIFEST_FILE).exists()
    return Corpus(folder).missing(count) if exists else list(range(count))


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
