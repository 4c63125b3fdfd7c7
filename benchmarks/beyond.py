"""What was tried beyond the paper, in one table: what each candidate knows, and what it adds.

SmolLM2 with the HMM of `examples/`. Set FORETRACE_DATA, FORETRACE_ENCODER, FORETRACE_CORPUS (that
the HMM was distilled from) and FORETRACE_RESULTS (where the judges of evaluation.py are, and all
that is made is kept; it takes an hour and goes on where it stopped). Control is held against that
of what is served, at equal perplexity. With --quick, a little of everything, in a folder that is
thrown away: it shows that it runs.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
from torch import Tensor

from candidates.control import control, point
from candidates.foresight import foresight
from candidates.reference import Weights
from candidates.saying import weights_of
from candidates.tasks import CANDIDATES, TASKS, Candidate
from candidates.workbench import QUICK, Size, Workbench
from candidates.writing import believed
from foretrace.engines.sampler import Sampler
from foretrace.evaluate import metrics
from foretrace.hmm import HMM, inference
from harness import Report, options, seconds
from smollm2 import find_smollm2


def compare(bench: Workbench, report: Report) -> None:
    """Measure every candidate."""
    for task in TASKS[: bench.size.tasks]:
        bare = point(bench, task, f"{task.name}, bare", Sampler(bench.lm, bench.ends, 20, 0.9))
        report.add(f"{task.name}, bare", bare.figure.value, "")
        served: list[metrics.Point] = []
        for candidate in CANDIDATES[:: bench.size.step]:
            weights, auc = weights_of(bench, task, candidate)
            report.add(f"{task.name}, {candidate.name}: AUC on validation", auc, "")
            if task.name == "detox-hard":
                _add_foresight(bench, candidate, weights, report)
            found = control(bench, task, candidate, weights)
            _add_control(report, f"{task.name}, {candidate.name}", found, served, bare)
            served = served or found


def _add_foresight(
    bench: Workbench, candidate: Candidate, weights: Weights, report: Report
) -> None:
    costs = bench.keep("detox-hard 0 phrases", dict)["costs"].float()
    likely, shares = foresight(bench, bench.look(candidate.look), weights, costs)
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
    report.add(f"{name}: strongest", found[-1].figure.value, "")
    rise = found[-1].price.value / bare.price.value - 1
    report.add(f"{name}: strongest, perplexity against bare", rise, "")
    if served:
        gain = metrics.at_equal_price(served[-1], found, bare.figure.value)
        for part, value in (gain._asdict() if gain else {}).items():
            report.add(f"{name}: against as served, at equal perplexity, {part}", value, "")


def costs(bench: Workbench, report: Report) -> None:
    """Measure what a step would add: the products of evidence, and a second filter."""
    for batch in (1, 32):
        ids = torch.randint(3, bench.hmm.vocab_size, (batch, 12))
        predicted = believed(bench.hmm, ids.tolist())
        step, heeded, filtered = seconds(
            _step(bench, ids),
            partial(_evidence, bench.hmm, predicted),
            partial(inference.step, bench.hmm, predicted, ids[:, 0]),
            repeats=5,
        )
        report.add(f"batch {batch}: evidence", heeded / step, "of the LM", at_most=0.03)
        report.add(
            f"batch {batch}: a second filter adds", filtered / step, "of the LM", at_most=0.05
        )


def _step(bench: Workbench, ids: Tensor) -> Callable[[], object]:
    """Let the LM write the token after some, again and again."""
    with torch.inference_mode():
        read = bench.lm(ids, use_cache=True).past_key_values

    @torch.inference_mode()
    def step() -> None:
        bench.lm(ids[:, :1], past_key_values=read, use_cache=True, logits_to_keep=1)
        read.crop(ids.shape[1])

    return step


def _evidence(hmm: HMM, predicted: Tensor) -> None:
    """Do the two products of a step of evidence, as they would be served."""
    ratio = 1 / hmm.emission.predict(predicted).clamp_min(1e-30)
    hmm.emission.expect(ratio, torch.arange(hmm.vocab_size))


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
