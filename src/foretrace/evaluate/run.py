"""An evaluation: write by every method, judge, measure, and compare with the baseline."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretrace import _io
from foretrace.engines.transformers import stop_tokens
from foretrace.errors import InvalidInputError
from foretrace.evaluate import metrics
from foretrace.evaluate.generations import Method, Sampling, Writer
from foretrace.evaluate.metrics import Measurement, Point, at_equal_price
from foretrace.evaluate.perplexity import surprise
from foretrace.evaluate.preparation import (
    Builder,
    fit_attributes,
    identity,
    lm_identity,
)
from foretrace.evaluate.scoring import Scorer
from foretrace.evaluate.suite import FIGURES, Suite
from foretrace.steering import Goal

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from foretrace.hmm import HMM

Observe = Callable[[str, int, int, str], None]
"""Told the stage, how far it is, of how much, and the unit."""


@dataclass(frozen=True)
class EvaluationConfig:
    """How much is written, and from where."""

    data: Path
    out: Path
    prompts: int | None = None
    """The first so many of the suite's; all if None."""
    continuations: int | None = None
    methods: tuple[str, ...] = ()
    """Only these, and the baseline."""
    seed: int = 0
    rows: int = 250
    encoder: str | None = None
    """Of the judges that are trained."""
    judges: Path | None = None
    """Where those are kept, if not beside the rest: several suites may share them."""


def evaluate(
    suite: Suite,
    lm: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    hmm: "HMM",
    config: EvaluationConfig,
    observe: Observe = lambda stage, done, total, unit: None,
) -> dict[str, Any]:
    """Run a suite and give its results; what is in the folder already is not done again."""
    rows = _prompts(suite, config)
    store = fit_attributes(suite, config.data, config.out / "attributes", tokenizer)
    builder = Builder(hmm, store, rows, suite.prompts.text)
    texts = builder.filled(suite.template)
    sampling = Sampling(
        continuations=config.continuations or suite.continuations,
        max_new_tokens=suite.max_new_tokens,
        top_p=suite.top_p,
        seed=config.seed,
        rows=config.rows,
    )
    ends = hmm.config.eos_token_ids
    begin = ends[0] if ends else None
    stops = stop_tokens(lm.generation_config, ends)
    writer = Writer(lm, tokenizer, sampling, stops, begin)
    scorers = {
        name: Scorer(
            name,
            plan,
            config.data,
            config.out,
            config.judges or config.out / "judges",
            config.encoder,
            str(lm.device),
            tokenizer,
            builder,
        )
        for name, plan in suite.judges.items()
    }
    bench = _Bench(suite, config, writer, scorers, texts, lm_identity(lm), observe)
    # What is wrong with a plan should be seen before hours of writing, not after.
    judges = {name: scorer.describe() for name, scorer in scorers.items()}
    methods = [builder.method(name, suite.methods[name]) for name in _chosen(suite, config.methods)]
    tables = hmm.identity()
    decided = {method.name: _decides(method, tables, texts) for method in methods}
    measured = {method.name: bench.measure(method, decided[method.name]) for method in methods}
    costs = bench.costs(methods, {"methods": decided, "sampling": asdict(sampling)})
    results = _plain(
        {
            "suite": suite.name,
            "lm": getattr(lm.config, "_name_or_path", "").rstrip("/").rsplit("/", 1)[-1],
            "hmm": {"states": hmm.num_states, "source_model": hmm.config.source_model},
            "prompts": len(texts),
            "sampling": asdict(sampling),
            "baseline": suite.baseline,
            "rival": suite.rival,
            "judges": judges,
            "methods": _compared(measured, costs, suite),
            "at equal perplexity": _at_equal_perplexity(measured, suite),
        }
    )
    _io.write_json(config.out / "results.json", results)
    return results


def _prompts(suite: Suite, config: EvaluationConfig) -> list[dict[str, Any]]:
    """Read the prompts, each once; of groups, so many of them that all have their share."""
    distinct = {
        (row[suite.prompts.text], row.get(suite.group or "")): row
        for row in reversed(suite.prompts.rows(config.data))
    }
    rows = list(reversed(distinct.values()))
    wanted = min(config.prompts or len(rows), len(rows))
    if suite.group is None:
        return rows[:wanted]
    return [rows[place * len(rows) // wanted] for place in range(wanted)]


def _plain(content: Mapping[str, Any]) -> dict[str, Any]:
    """Give results as JSON can hold them: None for NaN."""
    return {key: _plain_value(value) for key, value in content.items()}


def _plain_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _plain(value)
    if isinstance(value, list | tuple):
        return [_plain_value(each) for each in value]
    return None if isinstance(value, float) and isnan(value) else value


def _chosen(suite: Suite, methods: Sequence[str]) -> list[str]:
    if unknown := [name for name in methods if name not in suite.methods]:
        raise InvalidInputError(
            f"The suite '{suite.name}' has no method '{unknown[0]}'; it has "
            f"{', '.join(suite.methods)}."
        )
    return [name for name in suite.methods if not methods or name in (*methods, suite.baseline)]


def _decides(method: Method, hmm: str, prompts: Sequence[str]) -> dict[str, Any]:
    """Name what a method's texts depend on, beside how they are drawn."""
    goals = [
        [(identity(goal.lookahead.attribute), *_how(goal)) for goal in own]
        for own in method.goals or []
    ]
    given = [goals, method.prompts or prompts, method.best_of, [*map(identity, method.best_by)]]
    described = json.dumps(given, ensure_ascii=False).encode("utf-8", "surrogatepass")
    # Bare texts do not depend on the HMM: it may be exchanged without drawing them anew.
    steered = hmm if method.goals else None
    return {"given": hashlib.sha256(described).hexdigest(), "hmm": steered}


def _how(goal: Goal) -> tuple[float, ...]:
    ahead = goal.lookahead
    return ahead.horizon, goal.neutral_end, goal.strength, goal.shift


@dataclass(frozen=True)
class _Bench:
    """Writes, judges and measures, method by method."""

    suite: Suite
    config: EvaluationConfig
    writer: Writer
    scorers: Mapping[str, Scorer]
    prompts: Sequence[str]
    lm: str
    """What the LM is, so that another one's texts are not taken for its own."""
    observe: Observe

    def costs(self, methods: Sequence[Method], settings: Mapping[str, Any]) -> dict[str, float]:
        """Give the time that each method takes to write, against the baseline's, once."""
        file = self.config.out / "costs.json"
        known = _io.read_json(file) if file.is_file() else {}
        found: dict[str, float] = known.get("costs", {})
        if known.get("settings") == settings and known.get("lm") == self.lm:
            return found
        (baseline,) = [each for each in methods if each.name == self.suite.baseline]
        found = {baseline.name: 1.0}
        for done, method in enumerate(methods, 1):
            if method is not baseline:
                found[method.name] = self.writer.cost(self.prompts, method, baseline)
            self.observe("time", done, len(methods), "methods")
        _io.write_json(file, {"settings": settings, "lm": self.lm, "costs": found})
        return found

    def measure(self, method: Method, settings: Mapping[str, Any]) -> "_Measured":
        name = method.name.replace("/", "-")
        written = self.writer.write(
            self.prompts,
            method,
            self.config.out / "generations" / f"{name}.jsonl",
            {**settings, "lm": self.lm},
            lambda done, total: self.observe(f"write: {name}", done, total, "prompts"),
        )
        texts = [each.texts for each in written]
        found: dict[str, Measurement] = {}
        groups: dict[str, dict[str, float]] = {}
        for judge, scorer in self.scorers.items():
            scores = scorer.score(
                texts, lambda done, total: self.observe(f"judge: {name}", done, total, "texts")
            )
            if self.suite.group is not None:
                groups[judge] = _by_group(scores, scorer.builder.prompts, self.suite.group)
            for figure in scorer.plan.figures:
                found[f"{judge}, {figure.replace('_', ' ')}"] = FIGURES[figure](scores)
        found["perplexity"] = metrics.perplexity(self._surprise(name, texts))
        found["words"] = metrics.words(texts)
        found["blank"] = metrics.blank(texts)
        found["dist-2"] = metrics.distinct(texts, 2)
        found["dist-3"] = metrics.distinct(texts, 3)
        if method.best_of == 1:  # of what is chosen among several, the probability is not known
            found["entropy"] = metrics.mean_score([each.nats for each in written])
        return _Measured(found, groups)

    def _surprise(self, name: str, texts: Sequence[Sequence[str]]) -> list[list[float | None]]:
        """Ask the bare LM how surprising the texts are, once."""
        file = self.config.out / "surprise" / f"{name}.json"
        given = json.dumps([texts, list(self.prompts), self.writer.begin, self.lm])
        key = hashlib.sha256(given.encode()).hexdigest()
        if file.is_file() and (kept := _io.read_json(file)).get("texts") == key:
            found: list[list[float | None]] = kept["nats"]
            return found
        found = surprise(
            self.writer.lm,
            self.writer.tokenizer,
            self.prompts,
            texts,
            begin=self.writer.begin,
            observe=lambda done, total: self.observe(f"read: {name}", done, total, "texts"),
        )
        _io.write_json(file, {"texts": key, "nats": found})
        return found


def _by_group(
    scores: Sequence[Sequence[float | None]], prompts: Sequence[Mapping[str, Any]], column: str
) -> dict[str, float]:
    """Average the scores of each group of prompts."""
    members: dict[str, list[int]] = {}
    for place, row in enumerate(prompts):
        members.setdefault(str(row[column]), []).append(place)
    return {
        group: metrics.mean_score([scores[place] for place in places]).value
        for group, places in members.items()
    }


@dataclass(frozen=True)
class _Measured:
    figures: dict[str, Measurement]
    groups: dict[str, dict[str, float]]
    """Of each judge, the mean score of every group."""


def _compared(
    measured: Mapping[str, _Measured], costs: Mapping[str, float], suite: Suite
) -> dict[str, Any]:
    """Give every figure with its interval, and its change against the baseline."""
    base = measured[suite.baseline]
    results: dict[str, Any] = {}
    for name, own in measured.items():
        figures = {}
        for figure, measurement in own.figures.items():
            figures[figure] = {
                **metrics.interval(measurement)._asdict(),
                "dropped": measurement.dropped,
            }
            if name != suite.baseline and figure in base.figures:
                changed = metrics.change(measurement, base.figures[figure])
                figures[figure]["difference"] = list(changed.difference)
                figures[figure]["relative"] = list(changed.relative)
        results[name] = {
            "plan": asdict(suite.methods[name]),
            "cost": costs[name],
            "figures": figures,
            "groups": own.groups,
        }
    return results


def _at_equal_perplexity(measured: Mapping[str, _Measured], suite: Suite) -> list[dict[str, Any]]:
    """Hold every curve against the points of every other: the first figure, at no greater price."""
    base = measured[suite.baseline].figures
    name = next(iter(base))
    curves: dict[str, dict[str, Point]] = {}
    for method, own in measured.items():
        if curve := suite.methods[method].curve:
            point = Point(own.figures[name], own.figures["perplexity"])
            curves.setdefault(curve, {})[method] = point
    start = Point(base[name], base["perplexity"])  # every curve begins at strength 0
    return [
        {"curve": curve, "rival": rival, "figure": name, "difference": difference}
        for curve, points in curves.items()
        for other, rivals in curves.items()
        if other != curve
        for rival, point in rivals.items()
        for difference in [at_equal_price(point, [start, *points.values()], start.figure.value)]
    ]
