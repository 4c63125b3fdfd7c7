"""Time a suite with this checkout and with an earlier one: what a change of the harness saves.

FORETRACE_BEFORE names the folder of the earlier checkout, such as one of `git worktree add`. Both
run the suite `sentiment` on 30 prompts x 5 from nothing, one after the other, each in a folder of
its own. FORETRACE_DATA names the folder of the suite's data, and FORETRACE_ENCODER a model for its
judge. With --quick, they run a part of the suite without samples and encoder, and without
FORETRACE_BEFORE this checkout is compared with itself.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from evaluation import EXAMPLE, QUICK_SUITE, ROOT
from harness import Report, options
from smollm2 import find_smollm2


def main() -> None:
    """Run the suite twice."""
    arguments = options(__doc__)
    report = Report("A suite with this checkout against an earlier one")
    before = os.environ.get("FORETRACE_BEFORE", ROOT if arguments.quick else None)
    if before is None:
        sys.exit("Set FORETRACE_BEFORE to the folder of an earlier checkout.")
    with tempfile.TemporaryDirectory() as scratch:
        suite, size = "sentiment", ("--prompts", 30, "--continuations", 5)
        if arguments.quick:
            suite, size = str(Path(scratch) / "quick.yaml"), ("--prompts", 2, "--continuations", 2)
            Path(suite).write_text(QUICK_SUITE)
        encoder = None if arguments.quick else os.environ.get("FORETRACE_ENCODER")
        more = size if encoder is None else (*size, "--encoder", encoder)
        checkouts = {"before": Path(before), "now": ROOT}
        runs = {
            name: run(folder, suite, Path(scratch) / name, more)
            for name, folder in checkouts.items()
        }
    for name, (seconds, _) in runs.items():
        report.add(f"{name}: time of the suite", seconds, "s")
    report.add("now / before", runs["now"][0] / runs["before"][0], "", at_most=0.5)
    for name, (_, methods) in runs.items():
        for method, figures in methods.items():
            for figure in ("perplexity", "positive, mean"):
                interval = figures[figure]["value"], figures[figure]["low"], figures[figure]["high"]
                report.add(f"{name}: {method}: {figure}", interval[0], "", interval=interval[1:])
    report.publish(arguments.json)


def run(
    checkout: Path, suite: str, out: Path, more: Sequence[object]
) -> tuple[float, dict[str, Any]]:
    """Run the suite with the code of a checkout; return the seconds and each method's figures."""
    data = os.environ["FORETRACE_DATA"]
    command = [sys.executable, "-m", "foretrace", "evaluate", find_smollm2(), "--hmm", EXAMPLE]
    command += ["--suite", suite, "--data", data, "--out", out, *more]
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
    start = perf_counter()
    subprocess.run(list(map(str, command)), check=True, env=environment)
    seconds = perf_counter() - start
    methods = json.loads((out / "results.json").read_text())["methods"]
    return seconds, {name: method["figures"] for name, method in methods.items()}


if __name__ == "__main__":
    main()
