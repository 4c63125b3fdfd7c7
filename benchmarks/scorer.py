"""Measure an attribute that is fitted to a scorer's scores of the LM's own texts.

`foretrace fit` has SmolLM2 continue prompts, and VADER, a lexicon with rules, score the texts. The
attribute steers other prompts at its levels, and the judge of the suite `sentiment` scores the
texts: it was trained on reviews, and has seen neither the texts nor VADER. FORETRACE_DATA names the
folder of data, FORETRACE_ENCODER the judge's sentence encoder, and FORETRACE_RESULTS a folder that
keeps the texts and the judge. --quick samples few texts, which an attribute of `examples/` judges.
Install first: pip install vaderSentiment
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

from ablation import Bench, figures
from foretrace import Attribute, Compiler, Goal
from foretrace.evaluate.metrics import change, interval
from foretrace.evaluate.suite import load_suite
from foretrace.lookahead.levels import BUDGETS
from harness import Report, options
from price import EXAMPLES
from smollm2 import find_smollm2

SCORER = "peers.judges:sentiment"


def fit(folder: Path, quick: bool) -> Attribute:
    """Fit the attribute by the command line."""
    out = folder / "vader.safetensors"
    arguments = ["--lm", find_smollm2(), "--hmm", EXAMPLES / "smollm2-135m", "--scorer", SCORER]
    if quick:
        arguments += ["--num-texts", 100]
    else:
        prompts = Path(os.environ["FORETRACE_DATA"]) / "detox" / "train_prompts.jsonl.xz"
        arguments += ["--prompts", prompts]
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]
    subprocess.run(
        [sys.executable, "-m", "foretrace", "fit", *map(str, arguments), "--out", str(out)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        check=True,
    )
    return Attribute.load(out)


def measure(report: Report, folder: Path, quick: bool) -> None:
    """Fit the attribute, steer at its levels, and judge the texts."""
    started = perf_counter()
    attribute = fit(folder, quick)
    report.add("time of the fit with its levels", perf_counter() - started, "s")
    report.add("AUC on held-out samples", attribute.config.fit["auc"], "")
    bench, suite = Bench(folder, quick), load_suite("sentiment")
    rows = suite.prompts.rows(bench.data)[: bench.num_prompts]
    runs = bench.runs([row[suite.prompts.text] for row in rows], bench.copies, seed=0)
    judges = bench.judges(suite, rows, quick)
    bare = figures(bench, runs, runs.draw(None), judges)
    compiler = Compiler(bench.hmm, runs.max_new_tokens, memory=0)
    shown = {"bare": bare}
    for level in BUDGETS:
        drawn = runs.draw(compiler.compile(Goal(attribute, level=level)))
        shown[level] = figures(bench, runs, drawn, judges)
    for level, measured in shown.items():
        for figure, one in measured.items():
            report.add(f"{level}: {figure}", one.value, "", interval=interval(one)[1:])
        rise = change(measured["perplexity"], bare["perplexity"]).relative
        report.add(f"{level}: perplexity against bare", rise.value, "", interval=rise[1:])


def main() -> None:
    """Fit and measure."""
    args, report = options(__doc__), Report("Positive texts, by VADER's scores of the LM's texts")
    if args.quick:
        with tempfile.TemporaryDirectory() as folder:
            measure(report, Path(folder), quick=True)
    else:
        measure(report, Path(os.environ["FORETRACE_RESULTS"]), quick=False)
    report.publish(args.json)


if __name__ == "__main__":
    main()
