"""What benchmarks share: the two options, timing, one table, JSON rows."""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Row:
    """One figure: what, how much, and whether it reached its goal (None where there is none)."""

    name: str
    value: float
    unit: str
    goal: str | None
    holds: bool | None


@dataclass
class Report:
    """The figures of one run."""

    title: str
    rows: list[Row] = field(default_factory=list)

    def add(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        at_most: float | None = None,
        at_least: float | None = None,
    ) -> None:
        """Record a figure, with its goal if it has one."""
        goal, holds = None, None
        if at_most is not None:
            goal, holds = f"<= {at_most:g}", value <= at_most
        if at_least is not None:
            goal, holds = f">= {at_least:g}", value >= at_least
        self.rows.append(Row(name, value, unit, goal, holds))

    def publish(self, json_file: Path | None) -> None:
        """Print the table, and write the rows if a file is given."""
        table = Table("figure", "value", "unit", "goal", "holds", title=self.title)
        for row in self.rows:
            holds = "" if row.holds is None else ("yes" if row.holds else "NO")
            table.add_row(row.name, f"{row.value:.4g}", row.unit, row.goal or "", holds)
        Console(width=110).print(table)
        if json_file is not None:
            json_file.write_text(json.dumps([asdict(row) for row in self.rows], indent=2) + "\n")


@dataclass(frozen=True)
class Options:
    """How a benchmark was asked to run."""

    quick: bool
    json: Path | None


def options(description: str | None) -> Options:
    """Read `[--quick] [--json FILE]` from the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="end within 50 seconds")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    given = parser.parse_args()
    return Options(given.quick, given.json)


def seconds(*functions: Callable[[], object], repeats: int) -> list[float]:
    """Time functions by turns; the best of each, since noise only ever adds."""
    times: list[list[float]] = [[] for _ in functions]
    for turn in range(repeats + 1):
        for function, taken in zip(functions, times, strict=True):
            start = perf_counter()
            function()
            if turn:  # the first turn warms up
                taken.append(perf_counter() - start)
    return [min(taken) for taken in times]


def paired(
    base: Callable[[], object], other: Callable[[], object], pairs: int
) -> tuple[float, float]:
    """Time two functions by turns, in changing order: the base's seconds, and other / base.

    Both are medians over the pairs, so that a burst of somebody else's work does not count.
    """
    bases, ratios = [], []
    for turn in range(pairs + 1):
        times = {}
        for function in (base, other) if turn % 2 else (other, base):
            start = perf_counter()
            function()
            times[function] = perf_counter() - start
        if turn:  # the first turn warms up
            bases.append(times[base])
            ratios.append(times[other] / times[base])
    return median(bases), median(ratios)
