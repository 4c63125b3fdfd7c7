"""Prometheus metrics of all processes of a server, at /metrics together with those of vLLM."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from prometheus_client import Counter, Gauge, Histogram
from torch import Tensor

STEPS_BETWEEN_READS = 128  # of values on the device: reading them waits for it

REQUESTS = Counter("foretrace_requests", "Steered requests that began.")
REFUSED = Counter("foretrace_refused", "Requests with a goal that were refused.")
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
    "Expected attribute probability of texts in generation, mean over the last steps.",
    multiprocess_mode="mostrecent",
)


def observe_cache(event: str, value: float) -> None:
    """Count an event of a table cache: "hit", "miss" or "build"."""
    if event == "build":
        BUILD.observe(value)
    else:
        {"hit": HITS, "miss": MISSES}[event].inc(value)


@contextmanager
def timed_step() -> Iterator[None]:
    """Measure the time of a step on the host, without waiting for the device."""
    began = perf_counter()
    yield
    STEP.observe(perf_counter() - began)


class MeanEAP:
    """The mean EAP over many steps, summed on the device."""

    def __init__(self) -> None:
        self.total: Tensor | float = 0.0
        self.rows = self.steps = 0

    def add(self, eap: Tensor) -> None:
        """Add the EAP of every steered row: (n,)."""
        self.total = self.total + eap.sum()
        self.rows += len(eap)
        self.steps += 1
        if self.steps == STEPS_BETWEEN_READS:
            EAP.set(float(self.total) / self.rows)
            self.total, self.rows, self.steps = 0.0, 0, 0
