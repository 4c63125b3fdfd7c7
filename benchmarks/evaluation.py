"""The results of steering: every suite, on SmolLM2 with the HMM of `examples/`, or FORETRACE_HMM.

Set FORETRACE_DATA to the folder of the suites' data, FORETRACE_ENCODER to a model of
sentence-transformers for the judges, and FORETRACE_RESULTS to a folder where all that is made is
kept: it takes hours, and goes on where it stopped. Writes the pages `docs/results/*.md` of the
suites. With --quick, a few texts of one suite, in a folder that is thrown away.
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
}
BEST = "both transforms"


def main() -> None:
    """Run the suites, one after the other."""
    given = options(__doc__)
    report = Report("Steered against bare")
    if given.quick:
        with tempfile.TemporaryDirectory() as scratch:
            quick = ["--continuations", 4, "--method", "transform"]
            results = run_suite("sentiment", Path(scratch) / "sentiment", 6, *quick)
            _add(report, "sentiment", results, "transform", "positive, mean")
    else:
        kept = Path(os.environ["FORETRACE_RESULTS"])
        for suite, prompts in PROMPTS.items():
            results = run_suite(suite, kept / suite, prompts)
            _publish(suite, kept / suite)
            if suite.startswith("detox") and suite != "detox-curve":
                _goals(report, suite, results)
    report.publish(given.json)


def run_suite(
    suite: str,
    out: Path,
    prompts: int | None,
    *more: object,
    hmm: Path | None = None,
    judges: Path | None = None,
) -> dict[str, Any]:
    """Run a suite on the command line, and read its results; judges are kept beside, or there."""
    hmm = hmm or Path(os.environ.get("FORETRACE_HMM", EXAMPLE))
    data, encoder = os.environ["FORETRACE_DATA"], os.environ.get("FORETRACE_ENCODER")
    words = _words(suite, prompts, find_smollm2(), hmm, data, encoder, out)
    words += ["--judges", judges or out.parent / "judges", *more]
    subprocess.run([sys.executable, "-m", "foretrace", *map(str, words)], check=True)
    found: dict[str, Any] = json.loads((out / "results.json").read_text())
    return found


def _words(
    suite: str,
    prompts: int | None,
    lm: object,
    hmm: object,
    data: object,
    encoder: object,
    out: object,
) -> list[object]:
    """Give the words of the command line."""
    words = ["evaluate", lm, "--hmm", hmm, "--suite", suite, "--data", data]
    words += [] if prompts is None else ["--prompts", prompts]
    words += ["--dtype", "bfloat16"]
    words += [] if encoder is None else ["--encoder", encoder]
    return [*words, "--out", out]


def _publish(suite: str, out: Path) -> None:
    """Put the report and its figures among the documentation."""
    folder = ROOT / "docs" / "results"
    title, text = (out / "report.md").read_text().split("\n", 1)
    example, encoder = "examples/smollm2-135m", "all-MiniLM-L6-v2"
    words = _words(suite, PROMPTS[suite], "LM", example, "data", encoder, f"results/{suite}")
    text = f"{title}\n\nMade by `foretrace {' '.join(map(str, words))}`.\n{text}"
    for figure in out.glob("*.png"):
        shutil.copy(figure, folder / f"{suite}-{figure.name}")
        text = text.replace(f"({figure.name})", f"({suite}-{figure.name})")
    (folder / f"{suite}.md").write_text(text)


def _goals(report: Report, suite: str, results: dict[str, Any]) -> None:
    """Hold the best method against what was aimed at."""
    hard = suite == "detox-hard"
    most, any_of = "toxicity, average maximum", "toxicity, probability of any"
    _add(report, suite, results, BEST, most, at_most=-0.65 if hard else None)
    _add(report, suite, results, BEST, any_of, at_most=-0.85 if hard else -0.90)
    _add(report, suite, results, BEST, "perplexity", at_most=0.10)
    for name in ("dist-2", "dist-3"):
        difference = results["methods"][BEST]["figures"][name]["difference"][0]
        report.add(f"{suite}, {BEST}: {name}, lost", -difference, "", at_most=0.02)


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
