"""What was tried beyond the paper, in one table: what each candidate knows, and what it adds.

SmolLM2 with the HMM of `examples/`. Set FORETRACE_DATA, FORETRACE_ENCODER and FORETRACE_RESULTS
(where the judges of evaluation.py are, and all that is made is kept; it takes an hour and goes on
where it stopped). Control is held against that of what is served, at equal perplexity. With
--quick, a little of everything, in a folder that is thrown away: it shows that it runs.
"""

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from candidates.control import control, point
from candidates.costs import costs
from candidates.foresight import foresight
from candidates.reference import Weights
from candidates.saying import weights_of
from candidates.tasks import CANDIDATES, TASKS, Candidate
from candidates.workbench import QUICK, Size, Workbench
from foretrace.engines.transformers.sampler import Sampler
from foretrace.evaluate import metrics
from harness import Report, options
from smollm2 import find_smollm2


def compare(bench: Workbench, report: Report) -> None:
    """Measure every candidate."""
    for task in TASKS[: bench.size.tasks]:
        bare = point(bench, task, f"{task.name}, bare", Sampler(bench.lm, bench.ends, 20, 0.9))
        report.add(f"{task.name}, bare", bare.metric.value, "")
        served: list[metrics.Point] = []
        for candidate in CANDIDATES[:: bench.size.step]:
            weights, auc = weights_of(bench, task, candidate)
            report.add(f"{task.name}, {candidate.name}: AUC on validation", auc, "")
            if task.name == "detox-hard":
                _add_foresight(bench, candidate, weights, report)
            if candidate.steers:
                found = control(bench, task, candidate, weights)
                _add_control(report, f"{task.name}, {candidate.name}", found, served, bare)
                served = served or found


def _add_foresight(
    bench: Workbench, candidate: Candidate, weights: Weights, report: Report
) -> None:
    costs = bench.keep("detox-hard 0 phrases", dict)["costs"].float()
    likely, shares = foresight(
        bench, bench.tables(candidate.look), bench.look(candidate.look), weights, costs
    )
    for count, nats in likely.items():
        report.add(f"{candidate.name}: next {count} tokens", nats, "nats each")
    for later, share in shares.items():
        report.add(f"{candidate.name}: concordance, tokens 2 to {later + 1}", share, "")


def _add_control(
    report: Report,
    name: str,
    found: Sequence[metrics.Point],
    served: Sequence[metrics.Point],
    bare: metrics.Point,
) -> None:
    """Report the strongest point, and all that is gained at the perplexity of what is served."""
    report.add(f"{name}: strongest", found[-1].metric.value, "")
    rise = found[-1].perplexity.value / bare.perplexity.value - 1
    report.add(f"{name}: strongest, perplexity against bare", rise, "")
    if served:
        gain = metrics.at_equal_perplexity(served[-1], found, bare.metric.value)
        for part, value in (gain._asdict() if gain else {}).items():
            report.add(f"{name}: against as served, at equal perplexity, {part}", value, "")


def main() -> None:
    """Measure everything."""
    given = options(__doc__)
    report = Report("Beyond the paper")
    with tempfile.TemporaryDirectory() as scratch:
        if given.quick:
            bench = Workbench(find_smollm2(), QUICK, Path(scratch), None)
        else:
            kept = Path(os.environ["FORETRACE_RESULTS"])
            bench = Workbench(find_smollm2(), Size(), kept / "beyond", kept / "judges")
        costs(bench, report)
        compare(bench, report)
    report.publish(given.json)


if __name__ == "__main__":
    main()
