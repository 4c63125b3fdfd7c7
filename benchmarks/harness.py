"""Shared code of the benchmarks: options, timing, and a report as a table and as JSON."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Row:
    """One measurement. `holds` tells whether it meets its goal; None without a goal."""

    name: str
    value: float
    unit: str
    goal: str | None
    holds: bool | None
    interval: Sequence[float] | None = None
    """The bounds of a 95% confidence interval, if there is one."""


@dataclass
class Report:
    """The measurements of one run."""

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
        interval: Sequence[float] | None = None,
    ) -> None:
        """Add a measurement, with an optional goal and interval."""
        goals = []
        if at_least is not None:
            goals.append((f">= {at_least:g}", value >= at_least))
        if at_most is not None:
            goals.append((f"<= {at_most:g}", value <= at_most))
        goal = ", ".join(text for text, _ in goals) or None
        holds = all(held for _, held in goals) if goals else None
        self.rows.append(Row(name, value, unit, goal, holds, interval))
        print(f"{name}: {value:.4g} {unit}", file=sys.stderr, flush=True)  # progress of long runs

    def publish(self, json_file: Path | None) -> None:
        """Print the table, and write the rows as JSON if there is a file."""
        table = Table("figure", "value", "unit", "goal", "holds", title=self.title)
        for row in self.rows:
            holds = "" if row.holds is None else ("yes" if row.holds else "NO")
            value = f"{row.value:.4g}"
            if row.interval is not None:
                value += f" [{', '.join(f'{bound:.3g}' for bound in row.interval)}]"
            table.add_row(row.name, value, row.unit, row.goal or "", holds)
        Console(width=110).print(table)
        if json_file is not None:
            json_file.write_text(json.dumps([asdict(row) for row in self.rows], indent=2) + "\n")


@dataclass(frozen=True)
class Options:
    """The command-line options of a benchmark."""

    quick: bool
    json: Path | None


def options(description: str | None) -> Options:
    """Parse `[--quick] [--json FILE]` from the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="run within 50 seconds")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    arguments = parser.parse_args()
    return Options(arguments.quick, arguments.json)


def seconds(*functions: Callable[[], object], repeats: int) -> list[float]:
    """Time functions in turns and return the minimum of each, which has least noise."""
    times: list[list[float]] = [[] for _ in functions]
    for turn in range(repeats + 1):
        for function, durations in zip(functions, times, strict=True):
            start = perf_counter()
            function()
            if turn:  # the first turn is a warm-up
                durations.append(perf_counter() - start)
    return [min(durations) for durations in times]


def paired(
    base: Callable[[], object], other: Callable[[], object], pairs: int
) -> tuple[float, float]:
    """Time two functions in turns, and return the seconds of `base` and the ratio other / base.

    Both are medians over the pairs, which are robust against load from other processes.
    """
    bases, ratios = [], []
    for turn in range(pairs + 1):
        times = {}
        for function in (base, other) if turn % 2 else (other, base):
            start = perf_counter()
            function()
            times[function] = perf_counter() - start
        if turn:  # the first turn is a warm-up
            bases.append(times[base])
            ratios.append(times[other] / times[base])
    return median(bases), median(ratios)
