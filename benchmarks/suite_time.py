"""Time a suite with this checkout and with an earlier one: what a change of the harness saves.

FORETRACE_BEFORE names the folder of the earlier checkout, such as one of `git worktree add`. Both
run the suite `sentiment` on 30 prompts x 5 from nothing, one after the other, each in a folder of
its own. The time until the attributes are fitted is also reported apart. FORETRACE_DATA names the
folder of the suite's data, and FORETRACE_ENCODER a model for its judge. With --quick, they run a
part of the suite without samples and encoder, and without FORETRACE_BEFORE this checkout is
compared with itself.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import time  # as in the times of files
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from evaluation import EXAMPLE, QUICK_SUITE, ROOT
from harness import Report, options
from smollm2 import find_smollm2


def main() -> None:
    """Run the suite twice."""
    arguments = options(__doc__)
    report = Report("A suite with this checkout against an earlier one")
    earlier = os.environ.get("FORETRACE_BEFORE", ROOT if arguments.quick else None)
    if earlier is None:
        sys.exit("Set FORETRACE_BEFORE to the folder of an earlier checkout.")
    with tempfile.TemporaryDirectory() as scratch:
        suite, size = "sentiment", ("--prompts", 30, "--continuations", 5)
        if arguments.quick:
            suite, size = str(Path(scratch) / "quick.yaml"), ("--prompts", 2, "--continuations", 2)
            Path(suite).write_text(QUICK_SUITE)
        encoder = None if arguments.quick else os.environ.get("FORETRACE_ENCODER")
        more = size if encoder is None else (*size, "--encoder", encoder)
        checkouts = {"before": Path(earlier), "now": ROOT}
        runs = {
            name: run(folder, suite, Path(scratch) / name, more)
            for name, folder in checkouts.items()
        }
    for name, one in runs.items():
        report.add(f"{name}: time of the suite", one.seconds, "s")
        report.add(f"{name}: time until its attributes are fitted", one.fits, "s")
    before, now = runs["before"], runs["now"]
    report.add("now / before", now.seconds / before.seconds, "", at_most=0.5)
    ratio = now.after_fits / before.after_fits
    report.add("now / before, after the fits", ratio, "", at_most=0.5)
    for name, one in runs.items():
        for method, figures in one.methods.items():
            for figure in ("perplexity", "positive, mean"):
                interval = figures[figure]["value"], figures[figure]["low"], figures[figure]["high"]
                report.add(f"{name}: {method}: {figure}", interval[0], "", interval=interval[1:])
    report.publish(arguments.json)


class Run(NamedTuple):
    """What a run of the suite took, and what it measured."""

    seconds: float
    fits: float
    """The seconds until the attributes were fitted."""
    methods: dict[str, Any]
    """The figures of each method."""

    @property
    def after_fits(self) -> float:
        """The seconds after the attributes were fitted."""
        return self.seconds - self.fits


def run(checkout: Path, suite: str, out: Path, more: Sequence[object]) -> Run:
    """Run the suite with the code of a checkout."""
    data = os.environ["FORETRACE_DATA"]
    command = [sys.executable, "-m", "foretrace", "evaluate", find_smollm2(), "--hmm", EXAMPLE]
    command += ["--suite", suite, "--data", data, "--out", out, *more]
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
    start = time()
    subprocess.run(list(map(str, command)), check=True, env=environment)
    seconds = time() - start
    fitted = max(file.stat().st_mtime for file in (out / "attributes").glob("*.safetensors"))
    methods = json.loads((out / "results.json").read_text())["methods"]
    figures = {name: method["figures"] for name, method in methods.items()}
    return Run(seconds, fitted - start, figures)


if __name__ == "__main__":
    main()
