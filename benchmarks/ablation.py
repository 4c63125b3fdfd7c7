"""Measure what each part of a goal adds: words, embeddings, samples, context and lookahead.

SmolLM2 is steered by each form of an attribute at the price of `strong`, on prompts that no form
was calibrated on, with the same random numbers. The suites' judges score the texts.
FORETRACE_DATA names the folder of data, FORETRACE_ENCODER the sentence encoder of the judges, and
FORETRACE_RESULTS a folder that keeps judges, samples and hidden states. --suite NAME runs one
suite. --quick runs few texts of one suite, with the attribute as its own judge.

The forms, each of which adds to the one before, unless it says otherwise:

words           rewards of words, fitted to the texts
shared          rewards that words share through the LM's head
samples         fitted to samples of the LM, too: what suites and `foretrace fit --lm` do
samples + context
                and a reward that depends on the hidden state, at two weights
context alone   without rewards of words
no lookahead    weighs the next token alone
"""

import argparse
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from runpy import run_path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foretrace import HMM, Attribute, Compiler, Goal
from foretrace.attribute import ContextReward
from foretrace.attribute.fitting.context import TokenStates, fit_context
from foretrace.context import Head, Probe
from foretrace.engines.prompts import decode_after, encode_prompts
from foretrace.engines.transformers.calibration import Continuation, SteeredRuns
from foretrace.engines.transformers.samples import TeachingSamples, fit_teacher
from foretrace.engines.transformers.text_classifier import TextClassifier
from foretrace.engines.transformers.token_states import StoredStates, sample_states
from foretrace.evaluate.metrics import Measurement, change, interval, mean_score, perplexity, price
from foretrace.evaluate.scoring import Scorer
from foretrace.evaluate.suite import METRICS, JudgePlan, Suite, load_suite
from foretrace.lookahead.levels import BUDGETS, START, find_strength
from foretrace.lookahead.strengths import HMMPrices
from harness import Report
from price import END, EXAMPLES
from slope import rewards_of
from smollm2 import find_smollm2

SUITES = {"sentiment": "positive", "politics": "political", "detox-hard": "nontoxic"}
BUDGET, TOLERANCE = BUDGETS["strong"], 0.07  # of the price, on the prompts of the calibration
TOP_P, NUM_TOKENS, COPIES = 0.9, 20, 5
NUM_STATES = 60_000  # tokens that context rewards are fitted to
WEIGHTS = {"context x 0.5": 0.5, "context": 1.0}
SHIPPED = "samples"
FIRST_SAMPLED = 1000  # the prompts before it are for calibration


class Form(NamedTuple):
    """An attribute, and how many tokens it looks ahead."""

    attribute: Attribute
    horizon: int = NUM_TOKENS


class Judge(NamedTuple):
    """A judge of a suite: how it scores texts, and what is reported of its scores."""

    scorer: Scorer
    figures: Sequence[str]

    def measure(self, texts: Sequence[Sequence[str]]) -> Iterator[tuple[str, Measurement]]:
        """Score texts and yield the figures."""
        scores = self.scorer.score(texts)
        for figure in self.figures:
            yield figure.replace("_", " "), METRICS[figure](scores)


class Bench:
    """One LM, its HMM, and the samples that all attributes share."""

    def __init__(self, folder: Path, quick: bool) -> None:
        make = run_path(str(EXAMPLES / "attributes" / "make.py"))
        self.folder, self.sources = folder, make["SOURCES"]
        self.hmm = HMM.from_pretrained(EXAMPLES / "smollm2-135m")
        self.data = Path(os.environ["FORETRACE_DATA"])
        self.maker = make["Maker"](self.data, str(find_smollm2()), self.hmm)
        self.model, self.tokenizer = self.maker.model, self.maker.tokenizer
        self.num_prompts, self.copies = (2, 2) if quick else (100, COPIES)
        self.num_calibrated, self.num_states = (4, 1_000) if quick else (64, NUM_STATES)
        self.most_texts, self.quick = 300 if quick else None, quick

    @cached_property
    def probe(self) -> Probe:
        """The probe of the LM."""
        return Probe.build(Head.of_model(self.model, self.tokenizer))

    @cached_property
    def samples(self) -> TeachingSamples:
        """Texts of the LM, which rewards are fitted to."""
        file, prompts = self.folder / "samples.jsonl", self.maker.prompts[FIRST_SAMPLED:]
        options = {"prompts": prompts, "ends": END}
        return TeachingSamples.draw(self.model, self.tokenizer, file, **options)

    @cached_property
    def states(self) -> StoredStates:
        """Texts of the LM with their hidden states, which context rewards are fitted to."""
        prompts = encode_prompts(self.tokenizer, self.maker.prompts[FIRST_SAMPLED:])
        return sample_states(
            self.model, self.tokenizer, prompts, END, self.folder, max_states=self.num_states
        )

    def runs(self, prompts: Sequence[str], copies: int, seed: int) -> SteeredRuns:
        """Return runs that continue prompts."""
        return SteeredRuns(
            self.model,
            encode_prompts(self.tokenizer, prompts),
            ends=END,
            copies=copies,
            max_new_tokens=NUM_TOKENS,
            top_p=TOP_P,
            seed=seed,
        )

    def forms(self, name: str) -> dict[str, Form]:
        """Fit all forms of an attribute; in a quick run few, of which one is from `examples/`."""
        source = self.sources[name]
        texts, scores = self.maker.read(source.train, source)
        texts, scores = texts[: self.most_texts], scores[: self.most_texts]
        teacher = fit_teacher(self.model, self.tokenizer, texts, scores)
        assert teacher is not None
        words = self.maker.fit(name, source)
        if self.quick:
            shipped = shipped_attribute(name)
            reward = self.context(teacher, shipped)
            context = Form(shipped.with_context(reward))
            return {"words": Form(words), SHIPPED: Form(shipped), "samples + context": context}
        settings = self.maker.lm_settings
        shared = self.maker.fit(name, source, **settings)
        shipped = self.maker.fit(name, source, samples=self.samples.scored(teacher), **settings)
        reward = self.context(teacher, shipped)
        alone = Attribute.from_rewards([0.0] * self.probe.vocab_size, name=name)
        return {
            "words": Form(words),
            "shared": Form(shared),
            SHIPPED: Form(shipped),
            "samples, no lookahead": Form(shipped, 0),
            **{
                f"samples + {what}": Form(shipped.with_context(reward.scaled(weight)))
                for what, weight in WEIGHTS.items()
            },
            "context alone": Form(alone.with_context(reward)),
        }

    def context(self, teacher: TextClassifier, words: Attribute) -> ContextReward:
        """Fit a context reward to the LM's texts, as the teacher scores them."""
        written = self.tokenizer.batch_decode(self.states.rows(), skip_special_tokens=True)
        scores = torch.tensor(teacher.score(written)).float()
        held_out = torch.arange(len(scores)) % 10 == 0
        probe = self.probe
        table: Tensor = rewards_of(words, probe.vocab_size)
        data = TokenStates(*self.states, scores, held_out)
        return fit_context(
            data, table, probe.features, probe.basis, probe.config.fingerprint
        ).reward

    def steer(self, form: Form, calibration: SteeredRuns, runs: SteeredRuns) -> list[Continuation]:
        """Find the strength of the price, and continue the prompts with it."""
        attribute = replace(form.attribute, config=replace(form.attribute.config, levels={}))
        compiler = Compiler(self.hmm, form.horizon, self.probe, memory=0)

        def measured(strength: float) -> float:
            return calibration.price(compiler.compile(Goal(attribute, strength)))

        has_words = any(bool(part.dense(1 << 20).any()) for part in attribute.evidence)
        start = HMMPrices(self.hmm).strength(attribute, BUDGET) if has_words else START
        strength = find_strength(measured, BUDGET, {}, start=start, tolerance=TOLERANCE)
        return runs.draw(compiler.compile(Goal(attribute, strength)))

    def judges(self, suite: Suite, rows: Sequence[Mapping[str, Any]], quick: bool) -> list[Judge]:
        """Return the judges of a suite; in a quick run, an attribute of `examples/`."""
        plans: Mapping[str, JudgePlan] = suite.judges
        if quick:
            name = SUITES[suite.name]
            plans = {name: JudgePlan(("mean",), attribute=name)}
        return [
            Judge(
                Scorer(
                    name,
                    plan,
                    self.data,
                    self.folder / "ablation" / suite.name,
                    self.folder / "judges",
                    os.environ.get("FORETRACE_ENCODER"),
                    "cpu",
                    rows,
                    self.tokenizer,
                    lambda expression, row: shipped_attribute(expression),
                ),
                plan.figures,
            )
            for name, plan in plans.items()
        ]


def shipped_attribute(name: str) -> Attribute:
    """Load an attribute of `examples/`."""
    return Attribute.load(EXAMPLES / "attributes" / f"{name}.safetensors")


def measure(report: Report, bench: Bench, name: str, quick: bool) -> None:
    """Add the figures of all forms of a suite's attribute."""
    suite = load_suite(name)
    assert suite.calibration is not None
    rows = suite.prompts.rows(bench.data)[: bench.num_prompts]
    calibrated = suite.calibration.rows(bench.data)[: bench.num_calibrated]
    calibration = bench.runs([row[suite.calibration.text] for row in calibrated], 1, seed=1)
    runs = bench.runs([row[suite.prompts.text] for row in rows], bench.copies, seed=0)
    judges = bench.judges(suite, rows, quick)
    bare = figures(bench, runs, runs.draw(None), judges)
    shown = {"bare": bare}
    for form, made in bench.forms(SUITES[name]).items():
        shown[form] = figures(bench, runs, bench.steer(made, calibration, runs), judges)
    for form, measured in shown.items():
        for figure, one in measured.items():
            report.add(f"{name}, {form}: {figure}", one.value, "", interval=interval(one)[1:])
        if form == "bare":
            continue
        rise = change(measured["perplexity"], bare["perplexity"]).relative
        report.add(f"{name}, {form}: perplexity against bare", rise.value, "", interval=rise[1:])
        if form != SHIPPED:
            figure = next(iter(measured))
            less = change(measured[figure], shown[SHIPPED][figure]).difference
            title = f"{name}, {form} minus {SHIPPED}: {figure}"
            report.add(title, less.value, "", interval=less[1:])


def figures(
    bench: Bench, runs: SteeredRuns, drawn: Sequence[Continuation], judges: Sequence[Judge]
) -> dict[str, Measurement]:
    """Judge and measure texts; the first figure is the first judge's."""

    def by_prompt(values: list[Any]) -> list[list[Any]]:
        return [values[at : at + bench.copies] for at in range(0, len(values), bench.copies)]

    texts = by_prompt(
        [
            decode_after(bench.tokenizer, prompt, row.tokens)
            for prompt, row in zip(runs.prompts, drawn, strict=True)
        ]
    )
    measured = {figure: one for judge in judges for figure, one in judge.measure(texts)}
    measured["perplexity"] = perplexity(by_prompt([row.nats / len(row.tokens) for row in drawn]))
    measured["price"] = price(
        by_prompt([row.price / len(row.tokens) for row in drawn]),
        by_prompt([len(row.tokens) for row in drawn]),
    )
    measured["tokens"] = mean_score(by_prompt([float(len(row.tokens)) for row in drawn]))
    return measured


def main() -> None:
    """Measure all suites."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="run within 50 seconds")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--suite", choices=SUITES, help="run one suite")
    args = parser.parse_args()
    report = Report(f"Forms of an attribute at {BUDGET} nats per token")
    names = [args.suite] if args.suite else list(SUITES)
    if args.quick:
        with tempfile.TemporaryDirectory() as folder:
            measure(report, Bench(Path(folder), quick=True), names[0], quick=True)
    else:
        bench = Bench(Path(os.environ["FORETRACE_RESULTS"]), quick=False)
        for name in names:
            measure(report, bench, name, quick=False)
    report.publish(args.json)


if __name__ == "__main__":
    main()
