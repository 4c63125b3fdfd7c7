"""Compare the ready-made attributes with rewards of words alone, at equal price.

Every attribute of `examples/attributes` is fitted again to words alone, without the LM's token
frequencies, embeddings and samples. Both are calibrated on the same prompts, and continue other
prompts from the same random numbers. A linear judge on TF-IDF and embeddings scores their texts: it
was trained on the texts that the attribute was tested on, or where there are none, on those that it
was fitted to. The environment variable FORETRACE_DATA names the folder of data, and
FORETRACE_ENCODER the sentence encoder of the judge. Intervals are by resampling prompts. --quick
compares one attribute on few prompts.

`ablation.py` takes the rewards apart, with judges that were trained on other data.
`rewards-roles.yaml` compares them on characters.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from math import exp
from pathlib import Path
from runpy import run_path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer

from foretrace import HMM, Attribute, AttributeStore, Compiler, Goal
from foretrace.engines.prompts import decode_after, encode_prompts
from foretrace.engines.transformers.calibration import Continuation, SteeredRuns, calibrate
from foretrace.evaluate.linear_judge import LinearJudge
from foretrace.lookahead.levels import BUDGETS
from harness import Report, options
from price import END, EXAMPLES
from smollm2 import find_smollm2

Floats = NDArray[np.float64]
FIRST_PROMPT = 2000  # the samples and the calibration of the attributes use those before it
COPIES, NUM_TOKENS, RESAMPLES = 2, 24, 2000
LEVELS = ("medium", "strong")


class Judged(NamedTuple):
    """The judge's scores of texts, and means over all their tokens."""

    probabilities: Floats
    price: float
    nats: float


class Comparison(NamedTuple):
    """The texts of two attributes at the same levels, and those of the bare LM."""

    bare: Judged
    words: dict[str, Judged]
    shipped: dict[str, Judged]


class Bench:
    """Fits, calibrates and steers with one LM."""

    def __init__(self, quick: bool) -> None:
        self.make = run_path(str(EXAMPLES / "attributes" / "make.py"))
        lm = find_smollm2()
        hmm = HMM.from_pretrained(EXAMPLES / "smollm2-135m")
        self.maker = self.make["Maker"](Path(os.environ["FORETRACE_DATA"]), str(lm), hmm)
        self.tokenizer = AutoTokenizer.from_pretrained(lm)
        self.num_prompts, self.num_calibrated = (2, 4) if quick else (64, 32)
        self.store = AttributeStore(EXAMPLES / "attributes")

    def runs(self, first: int, count: int, copies: int, top_p: float) -> SteeredRuns:
        """Return runs of some of the prompts."""
        prompts = encode_prompts(self.tokenizer, self.maker.prompts[first : first + count])
        return SteeredRuns(
            self.maker.model,
            prompts,
            ends=END,
            copies=copies,
            max_new_tokens=NUM_TOKENS,
            top_p=top_p,
            seed=first,
        )

    def compare(self, name: str) -> Comparison:
        """Steer toward an attribute and toward its words."""
        source = self.make["SOURCES"][name]
        texts, scores = self.maker.read(source.test or source.train, source)
        labels = [str(score > 0.5) for score in scores]
        encoder = os.environ.get("FORETRACE_ENCODER")
        judge = LinearJudge.train(texts, labels, encoder=encoder).scorer("True")
        runs = self.runs(FIRST_PROMPT, self.num_prompts, COPIES, 0.9)

        def judged(drawn: Sequence[Continuation]) -> Judged:
            written = [
                decode_after(self.tokenizer, prompt, row.tokens)
                for prompt, row in zip(runs.prompts, drawn, strict=True)
            ]
            count = sum(len(row.tokens) for row in drawn)
            price, nats = sum(row.price for row in drawn), sum(row.nats for row in drawn)
            return Judged(np.array(judge(written)), price / count, nats / count)

        words, shipped = (
            {level: judged(drawn) for level, drawn in self.steer(runs, attribute).items()}
            for attribute in (self.maker.fit(name, source), self.store[name])
        )
        return Comparison(judged(runs.draw(None, "bare")), words, shipped)

    def steer(self, runs: SteeredRuns, attribute: Attribute) -> dict[str, Any]:
        """Calibrate an attribute, and continue the prompts at its levels."""
        budgets = {level: BUDGETS[level] for level in LEVELS}
        # The prompts of the published strengths, so that both attributes have the same ones.
        calibration = self.runs(0, self.num_calibrated, 1, 1.0)
        levels = calibrate(calibration, self.maker.hmm, attribute, budgets)
        compiler = Compiler(self.maker.hmm, NUM_TOKENS, memory=0)
        plain = replace(attribute, config=replace(attribute.config, levels={}))
        return {
            name: runs.draw(compiler.compile(Goal(plain, level.strength)), name)
            for name, level in levels.items()
        }


def by_prompt(values: Floats) -> Floats:
    """Return the mean of each prompt's texts."""
    return np.asarray(values.reshape(-1, COPIES).mean(1))


def interval(differences: Floats) -> tuple[float, float]:
    """Return a 95% interval of the mean, by resampling."""
    picks = np.random.default_rng(0).integers(len(differences), size=(RESAMPLES, len(differences)))
    low, high = np.quantile(differences[picks].mean(1), (0.025, 0.975))
    return float(low), float(high)


def at_perplexity(texts: Comparison, nats: float) -> Floats:
    """Return the probabilities of words alone at a perplexity, linear between its points."""
    points = sorted(
        [texts.bare, *(texts.words[level] for level in LEVELS)], key=lambda point: point.nats
    )
    known = [point.nats for point in points]
    high = min(max(1, int(np.searchsorted(known, nats))), len(points) - 1)
    share = float(np.interp(nats, known[high - 1 : high + 1], (0.0, 1.0)))
    return (1 - share) * points[high - 1].probabilities + share * points[high].probabilities


def add(report: Report, name: str, texts: Comparison) -> None:
    """Add the figures of an attribute."""
    bare = float(texts.bare.probabilities.mean())
    report.add(f"{name}: bare", bare, "probability")
    for level in LEVELS:
        words, shipped = texts.words[level], texts.shipped[level]
        for kind, one in (("words", words), ("shipped", shipped)):
            prefix = f"{name}, {level}, {kind}"
            report.add(f"{prefix}: judged", float(one.probabilities.mean()), "probability")
            report.add(f"{prefix}: price", one.price, "nats per token")
            report.add(f"{prefix}: perplexity", exp(one.nats - texts.bare.nats), "of bare")
        gain = by_prompt(shipped.probabilities - words.probabilities)
        low, high = interval(gain)
        report.add(
            f"{name}, {level}: shipped minus words at equal price",
            float(gain.mean()),
            "",
            interval=(low, high),
        )
        report.add(f"{name}, {level}: not worse, within chance", float(high >= 0), "", at_least=1)
        same = by_prompt(shipped.probabilities - at_perplexity(texts, shipped.nats))
        report.add(
            f"{name}, {level}: shipped minus words at equal perplexity",
            float(same.mean()),
            "",
            interval=interval(same),
        )


def main() -> None:
    """Compare all attributes."""
    args = options(__doc__)
    report, bench = Report("Ready-made attributes against words alone"), Bench(args.quick)
    for name in ["positive"] if args.quick else sorted(bench.store):
        add(report, name, bench.compare(name))
    report.publish(args.json)


if __name__ == "__main__":
    main()
