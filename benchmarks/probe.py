"""Measure the choice of a probe's tokens, what changed logits do to it, and its time.

The LM is SmolLM2-135M, as in the tests. --quick leaves out pivoted QR, which takes 15 seconds.
"""

import sys
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from foretrace.context import Head, Probe, read_head
from foretrace.context.choice import POOL, choose_tokens
from foretrace.context.measure import synthetic_errors
from foretrace.hmm import HMM
from harness import Report, options, seconds
from smollm2 import find_smollm2

ROOT = Path(__file__).parent.parent
BIASES = (0.1, 0.5, 1.0, 2.0, 5.0, 100.0)
COUNTS = (1, 5, 50, 200, 400)  # of changed logits
ROWS = 64


def main() -> None:
    """Compare choices, then change logits of the chosen tokens."""
    args = options(__doc__)
    report = Report("probe of SmolLM2-135M")
    head = read_head(find_smollm2())
    frequencies = HMM.from_pretrained(ROOT / "examples" / "smollm2-135m").token_frequencies()
    start = perf_counter()
    tokens = choose_tokens(head)
    report.add("choice: time", perf_counter() - start, "s")
    allowed = [token for token in range(len(head.weight)) if token not in head.excluded]
    candidates, size = torch.tensor(allowed), len(tokens)
    shuffled = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(0))
    choices = {
        "random": candidates[shuffled[:size]],
        "highest ids": candidates[-size:],
        "leverage": tokens,
    }
    if not args.quick:
        start = perf_counter()
        choices["pivoted QR"] = pivoted(head, candidates[-POOL * size :], size)
        report.add("pivoted QR: time", perf_counter() - start, "s")
    for name, chosen in choices.items():
        probe = build(head, chosen)
        report.add(f"{name}: condition number", probe.config.condition, "")
        for what, error in synthetic_errors(probe).items():
            report.add(f"{name}: {what}", error, "relative")
        report.add(f"{name}: share of texts", 100 * float(frequencies[chosen].sum()), "%")
    start = perf_counter()
    probe = Probe.build(head)
    report.add("build: time", perf_counter() - start, "s")
    change_logits(report, head, probe)
    report.publish(args.json)


def build(head: Head, tokens: Tensor) -> Probe:
    """Build a probe of exactly these tokens."""
    others = frozenset(range(len(head.weight))) - frozenset(tokens.tolist())
    return Probe.build(replace(head, excluded=others), features=1)


def pivoted(head: Head, pool: Tensor, size: int) -> Tensor:
    """Choose tokens by pivoted QR, a full rank of rows at a time."""
    from scipy.linalg import qr

    chosen: list[Tensor] = []
    rows = head.weight[pool].double()
    rows, left = rows - rows.mean(0), torch.arange(len(pool))
    for _ in range(size // rows.shape[1]):
        pivots = qr(rows[left].T.numpy(), mode="economic", pivoting=True)[2][: rows.shape[1]]
        chosen.append(left[pivots])
        keep = torch.ones(len(left), dtype=torch.bool)
        keep[pivots] = False
        left = left[keep]
    return pool[torch.cat(chosen)].sort().values


def change_logits(report: Report, head: Head, probe: Probe) -> None:
    """Add the worst error of readable rows after changes, and the times of reading."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(ROWS, head.weight.shape[1], generator=generator)
    logits = head.logits(states)
    worst = 0.0
    for count in COUNTS:
        changed = probe.tokens[torch.randperm(len(probe.tokens), generator=generator)[:count]]
        for bias in BIASES:
            edited = logits.index_add(1, changed, torch.full((ROWS, count), bias))
            found, readable = probe.read(edited)
            errors = (found - states).norm(dim=1) / states.norm(dim=1)
            worst = max(worst, float(errors[readable].max()) if readable.any() else 0.0)
    report.add("biases: worst error of readable rows", worst, "relative", at_most=0.02)
    masked = logits.index_fill(1, probe.tokens[::100], -torch.inf)
    times = seconds(lambda: probe.read(logits), lambda: probe.read(masked), repeats=5)
    report.add("read: time", 1e6 * times[0] / ROWS, "us a row")
    report.add("read with masked tokens: time", 1e6 * times[1] / ROWS, "us a row")


if __name__ == "__main__":
    main()
