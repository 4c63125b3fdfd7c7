"""Prometheus metrics of all processes of a server, at /metrics together with those of vLLM."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from prometheus_client import Counter, Histogram
from torch import Tensor

from foretrace.steering import Steering

STEPS_BETWEEN_READS = 128  # of values on the device: reading them waits for it
STEPS_BETWEEN_PRICES = 16  # a price costs several passes over the logits

REQUESTS = Counter("foretrace_requests", "Steered requests that began.")
REFUSED = Counter("foretrace_refused", "Requests with a goal that were refused.")
FAILED = Counter("foretrace_failed", "Admitted requests that could not be steered, and were ended.")
UNMET = Counter(
    "foretrace_unmet", "Steered texts that ended without required text, or with forbidden text."
)
UNREADABLE = Counter(
    "foretrace_unreadable",
    "Steered tokens without a context reward, because the hidden state was not readable.",
)
HITS = Counter("foretrace_table_hits", "Lookahead tables found in memory.")
MISSES = Counter("foretrace_table_misses", "Lookahead tables read from disk.")
BUILD = Histogram(
    "foretrace_table_build_seconds",
    "Time to build a lookahead table, or to compile a marker.",
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30),
)
STEP = Histogram(
    "foretrace_step_seconds",
    "Time of steering in a decoding step.",
    buckets=(0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1),
)
PRICE = Counter(
    "foretrace_price_nats",
    "Price of steering: the sum of KL(steered || bare) over the measured tokens, in nats.",
)
PRICED = Counter("foretrace_price_tokens", "Steered tokens whose price was measured.")


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


class PriceCounter:
    """Counts the price of steering in one of many steps, and sums it on the device."""

    def __init__(self) -> None:
        self.nats: Tensor | None = None
        self.tokens: Tensor | None = None
        self.steps = 0

    def is_due(self) -> bool:
        """Begin a step; return whether its prices are counted."""
        self.steps += 1
        if self.steps % STEPS_BETWEEN_READS == 0:
            self._count()
        return self.steps % STEPS_BETWEEN_PRICES == 1

    def add(self, nats: Tensor, is_steered: Tensor) -> None:
        """Add the price of every row, in nats, and count the steered rows: (n,) each."""
        total, tokens = nats.nan_to_num(0.0).sum(), is_steered.sum()  # NaN: no possible token
        self.nats = total if self.nats is None else self.nats + total
        self.tokens = tokens if self.tokens is None else self.tokens + tokens

    def _count(self) -> None:
        """Add the sums to the counters."""
        if self.nats is not None and self.tokens is not None:
            PRICE.inc(float(self.nats))
            PRICED.inc(int(self.tokens))
        self.nats = self.tokens = None


class UnreadableCounter:
    """Counts tokens without a context reward, which the steering sums on the device."""

    def __init__(self, steering: Steering) -> None:
        self.steering, self.steps, self.known = steering, 0, 0

    def step(self) -> None:
        """End a step; read the sum now and then, or at every step if that does not wait."""
        self.steps += 1
        if self.steering.hmm.device.type == "cpu" or self.steps % STEPS_BETWEEN_READS == 0:
            total = self.steering.unreadable
            UNREADABLE.inc(total - self.known)
            self.known = total
