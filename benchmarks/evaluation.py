"""Evaluate steering: every suite, on SmolLM2 with the HMM of `examples/` or of FORETRACE_HMM.

Set FORETRACE_DATA to the folder of the suites' data, FORETRACE_ENCODER to a sentence-transformers
model for the judges, and FORETRACE_RESULTS to the folder of all outputs. A run takes hours and
resumes where it stopped. It writes the pages `docs/results/*.md` of the suites. With --quick, it
generates a few texts of one suite in a temporary folder.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from harness import Report, options
from smollm2 import find_smollm2

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "smollm2-135m"
PROMPTS = {
    "detox-hard": 200,
    "detox": 200,
    "roles": None,
    "politics": 200,
    "politics+detox": 200,
    "detox-curve": 100,
    "sentiment": 200,
    "chat-roles": 200,
    "chat-sentiment": 200,
    "long-detox": 100,
    "long-sentiment": 100,
}
QUICK_SUITE = """
extends: sentiment
attributes:
  positive:
    file: sentiment/sst2_train.jsonl.xz
    score: positive
    objective: evidence
    uses_lm: false
methods:
  bare: {}
  steered: {goals: positive, strength: 0.5}
"""
STRONG, TRANSFORMED = "strong", "paper transform (20, -63), 3 tokens"


def main() -> None:
    """Run all suites."""
    arguments = options(__doc__)
    report = Report("Steered against bare")
    if arguments.quick:
        with tempfile.TemporaryDirectory() as scratch:
            results = run_quick_suite(Path(scratch))
            _add(report, "sentiment", results, "steered", "positive, mean")
    else:
        folder = Path(os.environ["FORETRACE_RESULTS"])
        for suite, prompts in PROMPTS.items():
            results = run_suite(suite, folder / suite, prompts)
            _publish(suite, folder / suite)
            if suite.startswith("detox") and suite != "detox-curve":
                _add_targets(report, suite, results)
            _add_blocks(report, suite, results)
    report.publish(arguments.json)


def run_quick_suite(folder: Path, hmm: Path | None = None) -> dict[str, Any]:
    """Generate a few texts of the suite `sentiment`, steered by a strength without calibration."""
    suite = folder / "quick.yaml"
    suite.write_text(QUICK_SUITE)
    return run_suite(str(suite), folder / "quick", 4, "--continuations", 2, hmm=hmm)


def run_suite(
    suite: str,
    out: Path,
    prompts: int | None,
    *more: object,
    hmm: Path | None = None,
    judges: Path | None = None,
) -> dict[str, Any]:
    """Run a suite on the command line and read its results; `judges` is the folder of judges."""
    hmm = hmm or Path(os.environ.get("FORETRACE_HMM", EXAMPLE))
    data, encoder = os.environ["FORETRACE_DATA"], os.environ.get("FORETRACE_ENCODER")
    command = _command(suite, prompts, find_smollm2(), hmm, data, encoder, out)
    command += ["--judges", judges or out.parent / "judges", *more]
    subprocess.run([sys.executable, "-m", "foretrace", *map(str, command)], check=True)
    results: dict[str, Any] = json.loads((out / "results.json").read_text())
    return results


def _command(
    suite: str,
    prompts: int | None,
    lm: object,
    hmm: object,
    data: object,
    encoder: object,
    out: object,
) -> list[object]:
    """Build the arguments of `foretrace`."""
    command = ["evaluate", lm, "--hmm", hmm, "--suite", suite, "--data", data]
    command += [] if prompts is None else ["--prompts", prompts]
    command += [] if encoder is None else ["--encoder", encoder]
    return [*command, "--out", out]


def _publish(suite: str, out: Path) -> None:
    """Copy the report and its plots to the documentation."""
    folder = ROOT / "docs" / "results"
    title, text = (out / "report.md").read_text().split("\n", 1)
    example, encoder = "examples/smollm2-135m", "all-MiniLM-L6-v2"
    command = _command(suite, PROMPTS[suite], "LM", example, "data", encoder, f"results/{suite}")
    text = f"{title}\n\nMade by `foretrace {' '.join(map(str, command))}`.\n{text}"
    for plot in out.glob("*.png"):
        shutil.copy(plot, folder / f"{suite}-{plot.name}")
        text = text.replace(f"({plot.name})", f"({suite}-{plot.name})")
    (folder / f"{suite}.md").write_text(text)


def _add_targets(report: Report, suite: str, results: dict[str, Any]) -> None:
    """Report the strong level, and the paper's transform against its targets."""
    hard = suite == "detox-hard"
    maximum, any_above = "toxicity, average maximum", "toxicity, probability of any"
    for name in (maximum, any_above, "perplexity"):
        _add(report, suite, results, STRONG, name)
    _add(report, suite, results, TRANSFORMED, maximum, at_most=-0.65 if hard else None)
    _add(report, suite, results, TRANSFORMED, any_above, at_most=-0.85 if hard else -0.90)
    _add(report, suite, results, TRANSFORMED, "perplexity", at_most=0.10)
    for method in (STRONG, TRANSFORMED):
        figures = results["methods"][method]["figures"]
        report.add(f"{suite}, {method}: price", figures["price"]["value"], "nats per token")
        for name in ("dist-2", "dist-3"):
            lost = -figures[name]["difference"][0]
            report.add(f"{suite}, {method}: {name}, lost", lost, "", at_most=0.02)


def _add_blocks(report: Report, suite: str, results: dict[str, Any]) -> None:
    """Report how far perplexity and repetition in blocks of tokens are from the baseline's."""
    for method in ("medium", STRONG):
        blocks = results["methods"].get(method, {}).get("blocks", [])
        for figure in ("perplexity", "repetition") if blocks else ():
            ratios = [block[figure]["ratio"][0] for block in blocks]
            worst = max((abs(ratio - 1) for ratio in ratios if ratio is not None), default=0.0)
            name = f"{suite}, {method}: largest change of a block's {figure}"
            report.add(name, worst, "", at_most=0.10 if method == "medium" else None)


def _add(
    report: Report,
    suite: str,
    results: dict[str, Any],
    method: str,
    figure: str,
    *,
    at_most: float | None = None,
) -> None:
    change = results["methods"][method]["figures"][figure]["relative"][0]
    name = f"{suite}, {method}: {figure}, relative change"
    report.add(name, change, "", at_most=at_most)


if __name__ == "__main__":
    main()
