"""Control on `detox-hard` against the likelihood of the HMM, by epochs of EM from a random start.

Set FORETRACE_CORPUS to a corpus of SmolLM2 (`work/corpus` of a distillation), FORETRACE_RESULTS to
a folder for all results, and the variables of `evaluation.py`. The last HMM is that of `examples/`.
With --quick, one small HMM of a small corpus, and a few texts.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from evaluation import EXAMPLE, ROOT, STRONG, run_quick_suite, run_suite
from harness import Report, options
from starts import small_corpus

STATES, EPOCHS = 512, (1, 2, 4, 8)
FIGURES = ("toxicity, average maximum", "perplexity")
QUICK_FIGURES = ("positive, mean", "perplexity")


def main() -> None:
    """Train, steer, and plot control against likelihood."""
    arguments = options(__doc__)
    report = Report("Control against the HMM's likelihood")
    if arguments.quick:
        with tempfile.TemporaryDirectory() as scratch:
            corpus = small_corpus(Path(scratch) / "corpus")
            hmm = _train(corpus.folder, Path(scratch) / "hmm", 16, 1, "--held-out", 32)
            results = run_quick_suite(Path(scratch), hmm)
            changed = results["methods"]["steered"]["figures"]
            _add(report, "16 states, 1 epoch", hmm, changed, QUICK_FIGURES)
    else:
        results_folder = Path(os.environ["FORETRACE_RESULTS"]) / "hmm-quality"
        hmms = {
            f"{STATES} states, {epochs} epochs": _train(
                Path(os.environ["FORETRACE_CORPUS"]), results_folder / f"{epochs}", STATES, epochs
            )
            for epochs in EPOCHS
        }
        hmms["the example, 1,024 states"] = EXAMPLE
        points = {}
        for number, (name, hmm) in enumerate(hmms.items()):
            more = ["--continuations", 10, "--method", STRONG]
            judges = results_folder.parent / "judges"
            out = results_folder / f"control {number}"
            results = run_suite("detox-hard", out, 50, *more, hmm=hmm, judges=judges)
            changed = results["methods"][STRONG]["figures"]
            points[name] = _add(report, name, hmm, changed, FIGURES)
        _draw(points, ROOT / "docs" / "results" / "hmm-quality.png")
    report.publish(arguments.json)


def _train(corpus: Path, out: Path, states: int, epochs: int, *more: object) -> Path:
    command = [sys.executable, "-m", "foretrace", "em", corpus, "--states", states]
    command += ["--epochs", epochs, "--evaluations", 1, "--out", out, *more]
    subprocess.run(list(map(str, command)), check=True)
    return out


def _add(
    report: Report, name: str, hmm: Path, changed: dict[str, Any], figures: tuple[str, ...]
) -> tuple[float, ...]:
    """Report the likelihood of an HMM, and the change of every metric against the bare LM."""
    config = json.loads((hmm / "config.json").read_text())
    likelihood = config["distillation"]["held_out_log_likelihood"]
    report.add(f"{name}: held-out log-likelihood", likelihood, "nats/token")
    changes = [changed[figure]["relative"][0] for figure in figures]
    for figure, change in zip(figures, changes, strict=True):
        report.add(f"{name}: {figure}, relative change", change, "")
    return likelihood, *changes


def _draw(points: dict[str, tuple[float, ...]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 4), layout="constrained")
    axes = figure.add_subplot()
    values = list(points.values())
    for column, label in enumerate(FIGURES, 1):
        axes.plot([p[0] for p in values], [100 * p[column] for p in values], "o-", label=label)
    for name, point in points.items():  # vertical, since some points are close together
        above = (point[0], 100 * max(point[1:]))
        axes.annotate(f"  {name}", above, fontsize=7, rotation=90, ha="center", va="bottom")
    axes.set_ylim(top=20)  # space for the names
    axes.set_xlabel("held-out log-likelihood of the HMM, nats per token")
    axes.set_ylabel("change against bare, %")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
