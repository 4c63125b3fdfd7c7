"""What Ray costs: tokens per second of sampling, and the memory of the driver.

python benchmarks/cluster.py LM           SmolLM2 under Ray with two workers against one process
python benchmarks/cluster.py LM --quick   fewer rows, to try it
python benchmarks/cluster.py --memory     the driver's memory for 1,000 and 100,000 empty shards

Both run on the cores of this machine. The two measurements of sampling alternate.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter

from foretrace._hardware import available_cores
from foretrace.distill import DistillConfig, EMConfig, LMConfig, stages
from foretrace.distill.executor import Load, LocalExecutor, Produce
from foretrace.distill.ray_executor import RayExecutor

LENGTH = 32
ROWS = 224  # a shard takes a worker with one core about a minute


@contextmanager
def nothing() -> Iterator[Produce]:
    """Produce empty shards."""
    yield lambda shard: 0


def driver_memory(shards: int) -> None:
    """Print the peak memory of a driver, in MB, after so many empty shards."""
    with RayExecutor(workers=2).workers("nothing", nothing) as produce:
        for _ in produce(range(shards)):
            pass
    print(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))


@contextmanager
def announced(load: Load, folder: Path) -> Iterator[Produce]:
    """Load an LM, and leave a file in a folder when it is loaded."""
    with load() as produce:
        (folder / f"{os.getpid()}.loaded").touch()
        yield produce


def measure(model: str, rows: int, shards: int) -> tuple[float, float]:
    """Return tokens per second under Ray with two workers, and in one process, after loading."""
    config = DistillConfig(
        num_states=2,
        sequences=rows * shards,
        length=LENGTH,
        shard_rows=rows,
        start="random",
        em=EMConfig(held_out=0),
    )
    rates = []
    for executor, workers in ((RayExecutor(workers=2), 2), (LocalExecutor(), 1)):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            load = partial(stages.sampling, model, LMConfig(), config, [], folder)
            with executor.workers("sampling", partial(announced, load, folder)) as produce:
                while len(list(folder.glob("*.loaded"))) < workers:
                    list(produce([0]))
                started = perf_counter()
                tokens = sum(produce(range(shards)))
                rates.append(tokens / (perf_counter() - started))
    return rates[0], rates[1]


def main() -> None:
    """Run a measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--shards", type=int, help="only the driver of --memory")
    arguments = parser.parse_args()
    if arguments.shards:
        driver_memory(arguments.shards)
    elif arguments.memory:
        for shards in (1_000, 10_000 if arguments.quick else 100_000):
            command = [sys.executable, __file__, "--shards", str(shards)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            print(f"{shards:,} shards: {float(done.stdout.splitlines()[-1]):.0f} MB")
    else:
        rows, shards, rounds = (16, 4, 1) if arguments.quick else (ROWS, 4, 2)
        print(f"{available_cores()} cores, {rows} rows of {LENGTH} tokens per shard")
        for _ in range(rounds):
            ray, bare = measure(arguments.model, rows, shards)
            print(f"Ray {ray:,.0f} tokens/s, one process {bare:,.0f}, ratio {ray / bare:.2f}")


if __name__ == "__main__":
    main()
