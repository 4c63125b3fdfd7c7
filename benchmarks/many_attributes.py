"""Measure the start, the memory and the first use of a folder of ten thousand attributes.

Every process of a server opens the folder in this way. The HMM is that of `examples/`. --quick uses
a thousand attributes.
"""

import resource
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from foretrace.engines.vllm.builder import TableBuilder
from foretrace.engines.vllm.params import SteeringParams, parse
from foretrace.engines.vllm.table_store import TableLoader, TableStore
from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM
from harness import Report, options
from random_attributes import write_random

EXAMPLE = Path(__file__).parent.parent / "examples" / "smollm2-135m"
TOKENS = 2_000  # with a weight, in each attribute
COLD = 50


def main() -> None:
    """Fill a folder, open it, and use some of its attributes."""
    args = options(__doc__)
    count = 1_000 if args.quick else 10_000
    report = Report(f"{count:,} attributes in a folder")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "attributes"
        _fill(folder, count)
        start, before = perf_counter(), _resident()
        hmm = HMM.from_pretrained(EXAMPLE)
        library = TableBuilder(hmm, folder, TableStore(Path(scratch) / "tables", 1 << 33))
        report.add("start: HMM and folder", perf_counter() - start, "s")
        start = perf_counter()
        listed = len(library.names())
        report.add(f"names of {listed:,}, listed", perf_counter() - start, "s")
        report.add("memory for it", _resident() - before, "MB")
        _use(report, library, count)
        report.add("memory, a hundred in use", _resident() - before, "MB")
    report.publish(args.json)


def _fill(folder: Path, count: int) -> None:
    """Write one attribute per user."""
    hmm = HMM.from_pretrained(EXAMPLE)
    fingerprint, share = hmm.config.tokenizer_fingerprint, TOKENS / hmm.vocab_size
    for user in range(count):
        name = f"user-{user}"
        write_random(folder, name, hmm.vocab_size, share=share, known=fingerprint, seed=user)


def _use(report: Report, library: TableBuilder, count: int) -> None:
    """Use some attributes for the first time and again; then use a name that does not exist."""
    cold, warm, ready = [], [], []
    loader = TableLoader(library.store, library.hmm, library.horizon)
    for user in range(0, count, count // (2 * COLD)):
        asked = _asked(f"user-{user}")
        start = perf_counter()
        (key,) = library.build(asked).tables
        cold.append(perf_counter() - start)
        start = perf_counter()
        loader.prefetch([key], {}).result()
        ready.append(perf_counter() - start)
        start = perf_counter()
        library.admit(asked)
        warm.append(perf_counter() - start)
    report.add("first use: admission", median(cold), "s", at_most=0.5)
    report.add("first use: admission, slowest", max(cold), "s")
    report.add("first use: the decoding process", 1000 * median(ready), "ms")
    report.add("later uses: admission", 1000 * median(warm), "ms")
    start = perf_counter()
    try:
        library.admit(_asked("user-x1"))
    except InvalidInputError as error:
        report.add(f"a name that does not exist ({error})", 1000 * (perf_counter() - start), "ms")


def _asked(goal: str) -> SteeringParams:
    asked = parse({"goal": goal})
    assert asked is not None
    return asked


def _resident() -> float:
    """Return the peak memory of this process, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
