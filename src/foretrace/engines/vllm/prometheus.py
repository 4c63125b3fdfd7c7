"""What a server counts, beside vLLM's own: seen at /metrics, from all of its processes."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from prometheus_client import Counter, Gauge, Histogram
from torch import Tensor

TIMES_BETWEEN_READS = 128  # of what lies on the device: reading it waits for it

REQUESTS = Counter("foretrace_requests", "Steered requests that were begun.")
REFUSED = Counter("foretrace_refused", "Requests with a goal that were not admitted.")
FAILED = Counter("foretrace_failed", "Admitted requests that could not be steered, and were ended.")
HITS = Counter("foretrace_table_hits", "Lookahead tables found in memory.")
MISSES = Counter("foretrace_table_misses", "Lookahead tables read from disk or built.")
BUILD = Histogram(
    "foretrace_table_build_seconds",
    "Time to build a lookahead table.",
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30),
)
STEP = Histogram(
    "foretrace_step_seconds",
    "Time of steering in a decoding step.",
    buckets=(0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1),
)
EAP = Gauge(
    "foretrace_mean_eap",
    "Expected attribute probability of texts being written, mean over the last steps.",
    multiprocess_mode="mostrecent",
)


def observe_library(event: str, value: float) -> None:
    """Count what a library tells of."""
    if event == "build":
        BUILD.observe(value)
    else:
        {"hit": HITS, "miss": MISSES}[event].inc(value)


@contextmanager
def timed_step() -> Iterator[None]:
    """Measure the time of a step on the host; what a device does meanwhile is not waited for."""
    began = perf_counter()
    yield
    STEP.observe(perf_counter() - began)


class MeanEAP:
    """A mean over many steps, summed up where the numbers are."""

    def __init__(self) -> None:
        self.total: Tensor | float = 0.0
        self.rows = self.times = 0

    def add(self, expected: Tensor) -> None:
        """Take in the expectation of every steered row: (n,)."""
        self.total = self.total + expected.sum()
        self.rows += len(expected)
        self.times += 1
        if self.times == TIMES_BETWEEN_READS:
            EAP.set(float(self.total) / self.rows)
            self.total, self.rows, self.times = 0.0, 0, 0
