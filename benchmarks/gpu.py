"""The cost of a steered decoding step on a GPU.

Operations and bytes are counted on a fake GPU, which runs everywhere, for the sizes of the table
and for one goal with rewards in each row. The time in which an A100 or an H100 moves these bytes
and launches these operations is arithmetic. On a machine with a GPU, the same step is also timed
there. With --quick, sizes are small, and it is timed on the CPU if there is no GPU.
"""

import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch

from fake_cuda_step import count_step
from foretrace import HMM, Attribute
from foretrace.steering import Compiler, Goal, Request, Steering
from foretrace.steering.batch_index import Kernels
from harness import Report, options, seconds
from inference import sparse_emission

STATES, VOCABULARIES, ROWS = (1024, 4096, 32768), (49152, 128256, 262144), (1, 64, 256)
SMALL_STATES, SMALL_VOCABULARY = 37, 1009  # no other dimension has these sizes
DENSITY = 0.01
LAUNCH = 5e-6  # seconds from Python to the start of a kernel
BANDWIDTH = {"A100": 2.0e12, "H100": 3.35e12}  # bytes per second, from the data sheets


class Counted(NamedTuple):
    """What a step does, with the emission sparse and the transition dense."""

    operations: int
    nbytes: int


def main() -> None:
    """Count, and measure where there is a GPU."""
    arguments = options(__doc__)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    report = Report(f"A steered step: arithmetic, and time on {device}")
    sizes = [(states, vocab) for states in STATES for vocab in VOCABULARIES]
    for states, vocab in [(64, 1000)] if arguments.quick else sizes:
        for rows in ROWS[:2] if arguments.quick else ROWS:
            name = f"{states:,} states, {vocab:,} tokens, {rows} rows"
            _add_arithmetic(report, name, count(states, vocab, rows))
            if device == "cuda" or arguments.quick:
                report.add(f"{name}: measured", 1e3 * measure(states, vocab, rows, device), "ms")
    report.publish(arguments.json)


def _add_arithmetic(report: Report, name: str, counted: Counted) -> None:
    launches = counted.operations * LAUNCH
    report.add(f"{name}: operations", counted.operations, "")
    report.add(f"{name}: moved", counted.nbytes / 1e6, "MB")
    for gpu, bandwidth in BANDWIDTH.items():
        bound = max(launches, counted.nbytes / bandwidth)
        report.add(f"{name}: {gpu}, at least", 1e3 * bound, "ms")


def count(states: int, vocab: int, rows: int) -> Counted:
    """Count the operations and bytes of a step of a large batch, on a small one."""
    hmm = HMM.random(SMALL_STATES, SMALL_VOCABULARY, eos_token_id=0)
    steering = steering_of(hmm, rows, "cuda")
    sizes = {SMALL_STATES: states, SMALL_VOCABULARY: vocab, SMALL_VOCABULARY + 1: vocab + 1}
    advancing, reweighting, _ = count_step(steering, rows, sizes)
    operations = len(advancing.names) + len(reweighting.names)
    entries = round(DENSITY * states * vocab)
    dense, sparse = 4 * states * vocab, 8 * entries + 8 * vocab  # values, states and offsets
    return Counted(operations, advancing.nbytes + reweighting.nbytes - dense + sparse)


def steering_of(hmm: HMM, rows: int, device: str) -> Steering:
    """Return the steering of rows that share a goal with rewards, computed as on a device."""
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(hmm.vocab_size, generator=generator) - 0.5
    goal = Compiler(hmm, horizon=3).compile(Goal(Attribute.from_rewards(rewards), 1.0))
    steering = Steering(hmm, kernels=Kernels.for_device(torch.device(device)))
    steering.start(dict.fromkeys(range(rows), Request(goal, (1,), 1 << 20)))
    return steering


def measure(states: int, vocab: int, rows: int, device: str) -> float:
    """Return the seconds of a step."""
    emission = sparse_emission(vocab, DENSITY, states)
    transition = torch.rand(states, states)
    transition /= transition.sum(1, keepdim=True)
    hmm = HMM(torch.full((states,), 1 / states), transition, emission).to(device)
    steering, slots = steering_of(hmm, rows, device), [*range(rows)]
    logits = torch.randn(rows, vocab, device=device)
    tokens = torch.randint(vocab, (rows,), device=device)

    def step() -> None:
        steering.reweight_(logits.clone(), slots)
        steering.advance(slots, tokens)
        if device == "cuda":
            torch.cuda.synchronize()

    (duration,) = seconds(step, repeats=10)
    return duration


if __name__ == "__main__":
    main()
