"""Measure the memory of steering while goals and markers come and go, one after another.

A server's decoding process does the same: it copies the tables of a goal into its pool when a
request starts, and gives them back when the request ends. Each goal and each marker is used once.
--quick uses 300 of each instead of 1,000.
"""

import resource
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from foretrace.attribute import Attribute
from foretrace.hmm import HMM
from foretrace.steering import Compiler, Goal, Marker, Request, Steering
from harness import Report, options

VOCAB, STATES, HORIZON = 8_192, 256, 64
BUDGET = 8 << 20  # bytes of the pool: it is full after some eighty goals
FIRST = 100  # goals, or markers, after which the memory must not grow


def main() -> None:
    """Use goals, then markers, and compare the memory after the first hundred and at the end."""
    args = options(__doc__)
    count = 300 if args.quick else 1_000
    report = Report(f"memory of steering, {count:,} goals and {count:,} markers")
    hmm = HMM.random(STATES, VOCAB, eos_token_id=0, seed=0)
    compiler, steering = Compiler(hmm, HORIZON, memory=0), Steering(hmm, memory=BUDGET)
    spelled = [index.to_bytes(2, "big") for index in range(VOCAB)]
    before = resident()
    sizes = []
    for number in range(count):
        use(compiler, steering, Goal(attribute(number), 1.0))
        sizes.append(resident())
    report.add("goals: memory at the end / after 100", sizes[-1] / sizes[FIRST], "", at_most=1.03)
    report.add("goals: pool", steering.pool.nbytes / BUDGET, "of the budget", at_most=1)
    known, sizes = attribute(0), []
    for number in range(count):
        marker = Marker(f"{number:06d}" * 33, spelled)  # 198 bytes
        use(compiler, steering, Goal(known, 1.0, after=marker))
        sizes.append(resident())
    report.add("markers: memory at the end / after 100", sizes[-1] / sizes[FIRST], "", at_most=1.03)
    report.add("all: pool", steering.pool.nbytes / BUDGET, "of the budget", at_most=1)
    report.add("all: memory beyond the budget", (resident() - before - BUDGET) / 2**20, "MB")
    report.publish(args.json)


def attribute(seed: int) -> Attribute:
    """Draw token weights."""
    weights = torch.rand(VOCAB, generator=torch.Generator().manual_seed(seed))
    return Attribute.from_weights(weights)


def use(compiler: Compiler, steering: Steering, goal: Goal) -> None:
    """Steer one token of a sequence toward a goal."""
    steering.start({0: Request(compiler.compile(goal), (1, 2, 3), 32)})
    steering.reweight_(torch.zeros(1, VOCAB), [0])
    steering.finish([0])


def resident() -> int:
    """Return the bytes of memory that the process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    main()
