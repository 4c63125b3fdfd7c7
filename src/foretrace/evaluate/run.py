"""An evaluation: generate with every method, judge, measure, and compare with the baseline."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import isnan
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from foretrace import _io
from foretrace.attribute import group_terms
from foretrace.chat import end_of_turn
from foretrace.engines.transformers import stop_tokens
from foretrace.engines.transformers.hidden_states import lm_identity
from foretrace.errors import InvalidInputError
from foretrace.evaluate import metrics
from foretrace.evaluate.blocks import (
    describe_blocks,
    has_blocks,
    repetition,
    split_losses,
    split_texts,
)
from foretrace.evaluate.continuations import ContinuationGenerator, Method, Sampling
from foretrace.evaluate.metrics import Measurement, Point
from foretrace.evaluate.perplexity import token_nll
from foretrace.evaluate.plugin import NO_PLUGIN, Plugin, load_plugin
from foretrace.evaluate.preparation import (
    MethodBuilder,
    fit_attributes,
    goal_checksum,
)
from foretrace.evaluate.scoring import Scorer
from foretrace.evaluate.strengths import OnStage, find_strengths
from foretrace.evaluate.suite import METRICS, MethodPlan, Suite
from foretrace.hmm import HMM
from foretrace.vocabulary import fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class EvaluationConfig:
    """The settings of an evaluation that are not the suite's.

    Attributes:
        data: The folder of the suite's files.
        out: The folder of all outputs, from which an interrupted evaluation resumes.
        prompts: The number of prompts; None for all.
        continuations: The number of continuations of each prompt. By default, the suite sets it.
        methods: The methods to run with the baseline; empty for all.
        seed: The seed of sampling.
        rows: The number of sequences in a batch.
        encoder: The sentence encoder of trained judges, by folder or hub id.
        judges: The folder of trained judges, if suites share them; None for a folder in `out`.

    Example:
        >>> from foretrace.evaluate.run import EvaluationConfig
        >>> EvaluationConfig(data=folder, out=folder / "results", prompts=10).rows
        250
    """

    data: str | os.PathLike[str]
    out: str | os.PathLike[str]
    prompts: int | None = None
    continuations: int | None = None
    methods: tuple[str, ...] = ()
    seed: int = 0
    rows: int = 250
    encoder: str | os.PathLike[str] | None = None
    judges: str | os.PathLike[str] | None = None


def evaluate(
    suite: Suite,
    lm: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    hmm: HMM,
    config: EvaluationConfig,
    on_progress: OnStage = lambda stage, done, total, unit: None,
) -> dict[str, Any]:
    """Run a suite and write `results.json`; outputs that are in the folder are not made again.

    Args:
        suite: The suite, from `load_suite`.
        lm: The language model.
        tokenizer: Its tokenizer.
        hmm: An HMM of the language model.
        config: The data and output folders, and how much to generate.
        on_progress: Called with the stage, the units done, all units, and the unit.

    Returns:
        The content of `results.json`: the metrics of each method with intervals and changes, the
        agreement of the judges, and the comparisons at equal price and at equal perplexity.

    Raises:
        InvalidInputError: If the suite does not have a method, or a template cannot be filled.
        InvalidFileError: If a file of the suite cannot be read, or the output folder holds texts
            that were generated with other settings.
    """
    rows = _read_prompts(suite, config)
    chosen = _chosen(suite, config.methods)
    data, out = Path(config.data), Path(config.out)
    store = fit_attributes(suite, data, out / "attributes", lm, tokenizer, hmm)
    builder = MethodBuilder(
        hmm,
        store,
        rows,
        suite.prompts.text,
        suite.template,
        tokenizer if suite.chat else None,
        _load_other_hmms(suite, chosen, tokenizer, hmm),
    )
    prompts = builder.inputs()
    generator = _build_generator(suite, lm, tokenizer, hmm, config)
    scorers = {
        name: Scorer(
            name,
            plan,
            data,
            out,
            Path(config.judges or out / "judges"),
            None if config.encoder is None else os.fspath(config.encoder),
            str(lm.device),
            rows,
            tokenizer,
            builder.attribute,
        )
        for name, plan in suite.judges.items()
    }
    runner = _Runner(suite, out, generator, scorers, prompts, lm_identity(lm), on_progress)
    # Judges and methods are built first, so that an error in a plan appears before hours of work.
    plugins = {
        name: load_plugin(plan.plugin, plan.options, lm, tokenizer)
        for name, plan in suite.methods.items()
        if name in chosen and plan.plugin is not None
    }
    _check_goals(suite, plugins)
    judges = {name: scorer.describe() for name, scorer in scorers.items()}
    identities = {"lm": runner.lm, "hmm": hmm.checksum}
    calibrated = find_strengths(
        suite, chosen, builder, generator, data, out, identities, on_progress
    )
    methods = [
        replace(
            builder.method(name, suite.methods[name], calibrated.factor(name)),
            plugin=plugins.get(name, NO_PLUGIN),
        )
        for name in chosen
    ]
    hmm_identities = {None: identities["hmm"]} | {
        source: other.checksum for source, other in builder.other_hmms.items()
    }
    inputs = {
        method.name: _method_inputs(
            method,
            hmm_identities[suite.methods[method.name].hmm],
            prompts,
            _plugin_inputs(suite.methods[method.name], method.plugin),
        )
        for method in methods
    }
    measured = {method.name: runner.measure(method, inputs[method.name]) for method in methods}
    sampling = asdict(generator.sampling)
    costs = runner.costs(methods, {"methods": inputs, "sampling": sampling})
    results = {
        "suite": suite.name,
        "lm": getattr(lm.config, "_name_or_path", "").rstrip("/").rsplit("/", 1)[-1],
        "hmm": {"states": hmm.num_states, "source_model": hmm.config.source_model},
        "other hmms": {
            Path(source).name: {"states": other.num_states}
            for source, other in builder.other_hmms.items()
        },
        "prompts": len(prompts),
        "sampling": sampling,
        "baseline": suite.baseline,
        "rival": suite.rival,
        "judges": judges,
        "calibration": calibrated._asdict(),
        "methods": _compare(measured, costs, suite),
        "at equal price": _compare_matched(measured, suite),
        "at equal perplexity": _compare_curves(measured, suite),
    }
    plain: dict[str, Any] = _without_nan(results)
    _io.write_json(out / "results.json", plain)
    return plain


def _build_generator(
    suite: Suite,
    lm: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    hmm: HMM,
    config: EvaluationConfig,
) -> ContinuationGenerator:
    """Build the generator of continuations; in a chat, the end of a turn ends a text."""
    sampling = Sampling(
        continuations=config.continuations or suite.continuations,
        max_new_tokens=suite.max_new_tokens,
        top_p=suite.top_p,
        seed=config.seed,
        rows=config.rows,
    )
    ends = [*hmm.config.eos_token_ids]
    bos = ends[0] if ends else None
    if suite.chat and (end := end_of_turn(tokenizer)) is not None:
        ends.append(end)
    stops = stop_tokens(lm.generation_config, ends)
    return ContinuationGenerator(lm, tokenizer, sampling, stops, bos, suite.chat)


def _load_other_hmms(
    suite: Suite, methods: Sequence[str], tokenizer: "PreTrainedTokenizerBase", hmm: HMM
) -> dict[str, HMM]:
    """Load the HMMs that methods name, to the device of the evaluation's."""
    sources = {suite.methods[name].hmm for name in methods}
    expected = fingerprint(tokenizer.get_vocab())
    return {
        source: HMM.from_pretrained(source, tokenizer_fingerprint=expected).to(hmm.device)
        for source in sorted(filter(None, sources))
    }


def _read_prompts(suite: Suite, config: EvaluationConfig) -> list[dict[str, Any]]:
    """Read the distinct prompts; if there are groups, choose evenly so that all are covered."""
    distinct = {
        (row[suite.prompts.text], row.get(suite.group or "")): row
        for row in reversed(suite.prompts.rows(config.data))
    }
    rows = list(reversed(distinct.values()))[suite.skip :]
    if not rows:
        raise InvalidInputError(
            f"The suite '{suite.name}' skips {suite.skip} prompts, and has no more than "
            f"{len(distinct)}. Lower `skip`."
        )
    count = min(config.prompts or len(rows), len(rows))
    if suite.group is None:
        return rows[:count]
    return [rows[index * len(rows) // count] for index in range(count)]


def _without_nan(value: Any) -> Any:
    """Replace NaN by None and tuples by lists, as JSON needs it."""
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and isnan(value) else value


def _chosen(suite: Suite, methods: Sequence[str]) -> list[str]:
    """Return the names of the methods to run, in the suite's order."""
    if unknown := [name for name in methods if name not in suite.methods]:
        raise InvalidInputError(
            f"The suite '{suite.name}' has no method '{unknown[0]}'; it has "
            f"{', '.join(suite.methods)}."
        )
    return [name for name in suite.methods if not methods or name in (*methods, suite.baseline)]


def _check_goals(suite: Suite, plugins: Mapping[str, Plugin]) -> None:
    """Refuse goals beside a plug-in's logits processor, which expects the LM's own logits."""
    for name, plugin in plugins.items():
        if suite.methods[name].goals and plugin.processor is not None:
            raise InvalidInputError(
                f"The method '{name}' has goals, and its plug-in {suite.methods[name].plugin} has "
                f"a logits processor. Both change the logits of the LM. Remove the goals, or use a "
                f"plug-in that has only a hook or a model."
            )


def _plugin_inputs(plan: MethodPlan, plugin: Plugin) -> list[Any]:
    """Return everything that identifies a plug-in; nothing for a method without one."""
    if plan.plugin is None:
        return []
    model = None if plugin.model is None else lm_identity(plugin.model)
    own = [] if plugin.top_p is None else [plugin.top_p]
    return [plan.plugin, dict(plan.options), plugin.identity, model, *own]


def _method_inputs(
    method: Method, hmm: str, prompts: Sequence[str], plugin: Sequence[Any]
) -> dict[str, Any]:
    """Return checksums of everything that a method's texts depend on, apart from sampling."""
    goals = [goal_checksum(goal) for goal in method.goals or []]
    best_by = [attribute.checksum for attribute in method.best_by]
    inputs = [goals, method.prompts or prompts, method.best_of, best_by, *plugin]
    content = json.dumps(inputs, ensure_ascii=False).encode("utf-8", "surrogatepass")
    # Unsteered texts do not depend on the HMM, and are kept when it changes.
    return {
        "given": hashlib.sha256(content).hexdigest(),
        "hmm": hmm if method.goals else None,
    }


def _has_price(plan: MethodPlan, plugin: Plugin) -> bool:
    """Return whether the price of a method is known: it changes nothing but the LM's logits."""
    if plan.best_of > 1 or plan.instruction is not None:
        return False
    return plan.plugin is None or plugin.has_price


@dataclass(frozen=True)
class _MethodResult:
    """The metrics of a method, as a whole and by position, and each judge's mean by group."""

    metrics: dict[str, Measurement]
    groups: dict[str, dict[str, float]]
    blocks: list[dict[str, Measurement]]
    """The metrics of every block of tokens; empty if a text has only one block."""


@dataclass(frozen=True)
class _Runner:
    """Generates, judges and measures, one method at a time."""

    suite: Suite
    out: Path
    generator: ContinuationGenerator
    scorers: Mapping[str, Scorer]
    prompts: Sequence[str]
    lm: str
    """The identity of the LM, so that texts of another one are not reused."""
    on_progress: OnStage

    def costs(self, methods: Sequence[Method], settings: Mapping[str, Any]) -> dict[str, float]:
        """Measure the time of each method relative to the baseline, or read it from the file."""
        file = self.out / "costs.json"
        cached = _io.read_json(file) if file.is_file() else {}
        costs: dict[str, float] = cached.get("costs", {})
        if cached.get("settings") == settings and cached.get("lm") == self.lm:
            return costs
        (baseline,) = [method for method in methods if method.name == self.suite.baseline]
        others = [method for method in methods if method is not baseline]
        costs = {baseline.name: 1.0} | self.generator.relative_costs(
            self.prompts,
            others,
            baseline,
            lambda done, total: self.on_progress("time", done, total, "turns"),
        )
        _io.write_json(file, {"settings": settings, "lm": self.lm, "costs": costs})
        return costs

    def measure(self, method: Method, settings: Mapping[str, Any]) -> _MethodResult:
        """Generate a method's texts and compute all metrics."""
        name = method.name.replace("/", "-")
        generations = self.generator.generate(
            self.prompts,
            method,
            self.out / "generations" / f"{name}.jsonl",
            {**settings, "lm": self.lm},
            lambda done, total: self.on_progress(f"write: {name}", done, total, "prompts"),
        )
        texts = [generation.texts for generation in generations]
        tokens = [generation.tokens for generation in generations]
        measurements, groups = self._judge(f"judge: {name}", texts)
        bare_nats = [generation.bare_nats for generation in generations]
        losses, block_losses = self._losses(name, texts, bare_nats)
        measurements["perplexity"] = metrics.perplexity(losses)
        if _has_price(self.suite.methods[method.name], method.plugin):
            prices = [generation.prices for generation in generations]
            measurements["price"] = metrics.price(prices, tokens)
        limit = self.generator.sampling.max_new_tokens
        measurements["tokens"] = metrics.mean_score([list(map(float, row)) for row in tokens])
        measurements["ended early"] = metrics.mean_score(
            [[float(count < limit) for count in row] for row in tokens]
        )
        measurements["words"] = metrics.words(texts)
        measurements["letters"] = metrics.letters(texts)
        measurements["repetition"] = metrics.repetition(texts)
        measurements["group terms"] = metrics.term_frequency(texts, group_terms())
        measurements["blank"] = metrics.blank(texts)
        measurements["dist-2"] = metrics.distinct(texts, 2)
        measurements["dist-3"] = metrics.distinct(texts, 3)
        if method.best_of == 1:  # the probability of the best of several candidates is unknown
            nats = [generation.nats for generation in generations]
            measurements["entropy"] = metrics.mean_score(nats)
        return _MethodResult(measurements, groups, self._measure_blocks(name, texts, block_losses))

    def _judge(
        self, stage: str, texts: Sequence[Sequence[str]]
    ) -> tuple[dict[str, Measurement], dict[str, dict[str, float]]]:
        """Compute the metrics of every judge, and its mean score by group."""
        measured: dict[str, Measurement] = {}
        groups: dict[str, dict[str, float]] = {}
        for judge, scorer in self.scorers.items():
            scores = scorer.score(
                texts, lambda done, total: self.on_progress(stage, done, total, "texts")
            )
            if self.suite.group is not None:
                groups[judge] = _group_means(scores, scorer.prompts, self.suite.group)
            for metric in scorer.plan.figures:
                measured[f"{judge}, {metric.replace('_', ' ')}"] = METRICS[metric](scores)
        return measured, groups

    def _measure_blocks(
        self, name: str, texts: Sequence[Sequence[str]], losses: Sequence[Measurement]
    ) -> list[dict[str, Measurement]]:
        """Judge and measure every block of the texts; nothing if there is only one."""
        if not losses:
            return []
        limit = self.generator.sampling.max_new_tokens
        parts = split_texts(self.generator.tokenizer, texts, limit)
        repetitions = repetition(parts)
        blocks = []
        for index, block in enumerate(parts):
            stage = f"judge: {name}, block {index + 1} of {len(parts)}"
            measured, _ = self._judge(stage, block)
            measured["perplexity"] = losses[index]
            measured["dist-3"] = metrics.distinct(block, 3)
            measured["repetition"] = repetitions[index]
            reached = [[float(bool(part)) for part in row] for row in block]
            measured["reached"] = metrics.mean_score(reached)
            blocks.append(measured)
        return blocks

    def _losses(
        self,
        name: str,
        texts: Sequence[Sequence[str]],
        known: Sequence[Sequence[Sequence[float] | None]],
    ) -> tuple[list[list[float | None]], list[Measurement]]:
        """Compute the unsteered LM's mean loss on each text, and on each of several blocks.

        The losses of tokens are known from the generation of some texts. Means are in nats per
        token, and kept in a file.
        """
        file = self.out / "surprise" / f"{name}.json"
        inputs = json.dumps([texts, list(self.prompts), self.generator.bos_token_id, self.lm])
        key = hashlib.sha256(inputs.encode()).hexdigest()
        limit = self.generator.sampling.max_new_tokens
        by_block = has_blocks(limit, self.generator.tokenizer)
        cached = _io.read_json(file) if file.is_file() else {}
        if cached.get("texts") != key or (by_block and "blocks" not in cached):
            nats = token_nll(
                self.generator.lm,
                self.generator.encode,
                self.prompts,
                texts,
                known=known,
                on_progress=lambda done, total: self.on_progress(
                    f"read: {name}", done, total, "texts"
                ),
            )
            means = [[fmean(text) if text else None for text in row] for row in nats]
            cached = {"texts": key, "nats": means}
            if by_block:
                cached["blocks"] = [
                    {"nats": block.totals.tolist(), "tokens": block.counts.tolist()}
                    for block in split_losses(nats, limit)
                ]
            _io.write_json(file, cached)
        blocks = [
            Measurement(np.asarray(block["nats"]), np.asarray(block["tokens"]))
            for block in cached.get("blocks", [])
        ]
        return cached["nats"], blocks


def _group_means(
    scores: Sequence[Sequence[float | None]], prompts: Sequence[Mapping[str, Any]], column: str
) -> dict[str, float]:
    """Compute the mean score of each group of prompts."""
    members: dict[str, list[int]] = {}
    for index, row in enumerate(prompts):
        members.setdefault(str(row[column]), []).append(index)
    return {
        group: metrics.mean_score([scores[index] for index in indices]).value
        for group, indices in members.items()
    }


def _compare(
    measured: Mapping[str, _MethodResult], costs: Mapping[str, float], suite: Suite
) -> dict[str, Any]:
    """Return every metric with its interval and its change against the baseline."""
    baseline = measured[suite.baseline]
    results: dict[str, Any] = {}
    for name, result in measured.items():
        figures = {}
        for metric, measurement in result.metrics.items():
            figures[metric] = {
                **metrics.interval(measurement)._asdict(),
                "dropped": measurement.dropped,
            }
            if name != suite.baseline and metric in baseline.metrics:
                figures[metric] |= _change(measurement, baseline.metrics[metric])
        results[name] = {
            "plan": asdict(suite.methods[name]),
            "cost": costs[name],
            "figures": figures,
            "groups": result.groups,
            "blocks": describe_blocks(result.blocks, baseline.blocks),
        }
    return results


def _change(measurement: Measurement, baseline: Measurement) -> dict[str, list[float]]:
    change = metrics.change(measurement, baseline)
    return {"difference": list(change.difference), "relative": list(change.relative)}


def _compare_matched(measured: Mapping[str, _MethodResult], suite: Suite) -> list[dict[str, Any]]:
    """Compare every method with the one whose price it matches, on the same prompts."""
    comparisons = []
    for name, result in measured.items():
        matched = suite.methods[name].match_price
        if matched is None or matched not in measured:
            continue
        theirs = measured[matched].metrics
        figures = {
            metric: _change(measurement, theirs[metric])
            for metric, measurement in result.metrics.items()
            if metric in theirs
        }
        comparisons.append({"method": name, "matched": matched, "figures": figures})
    return comparisons


def _compare_curves(measured: Mapping[str, _MethodResult], suite: Suite) -> list[dict[str, Any]]:
    """Compare every curve with the points of every other, by the first metric."""
    baseline = measured[suite.baseline].metrics
    metric = next(iter(baseline))
    curves: dict[str, dict[str, Point]] = {}
    for method, result in measured.items():
        if curve := suite.methods[method].curve:
            point = Point(result.metrics[metric], result.metrics["perplexity"])
            curves.setdefault(curve, {})[method] = point
    start = Point(baseline[metric], baseline["perplexity"])  # every curve begins at strength 0
    comparisons = []
    for curve, points in curves.items():
        for other, rivals in curves.items():
            if other == curve:
                continue
            for rival, point in rivals.items():
                difference = metrics.at_equal_cost(
                    point, [start, *points.values()], start.metric.value
                )
                comparisons.append(
                    {"curve": curve, "rival": rival, "figure": metric, "difference": difference}
                )
    return comparisons
