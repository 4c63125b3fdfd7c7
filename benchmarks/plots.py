"""Draw the plots of docs/results from the JSON of benchmarks/starts.py.

python benchmarks/plots.py STARTS.json docs/results
"""

import argparse
import json
import re
from collections import defaultdict
from pathlib import Path

from matplotlib.figure import Figure

AFTER_EM = re.compile(r"(\d+) states, (\w+), (\d+) sequences: after EM")


def main() -> None:
    """Draw likelihood against states, and against sequences."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("starts", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    rows, folder = json.loads(arguments.starts.read_text()), arguments.folder
    points = [
        (int(match[1]), match[2], int(match[3]), float(row["value"]))
        for row in rows
        if (match := AFTER_EM.match(row["name"]))
    ]
    most_sequences = max(sequences for _, _, sequences, _ in points)
    by_states: dict[str, list[tuple[int, float]]] = defaultdict(list)
    by_sequences: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for states, start, sequences, value in points:
        if sequences == most_sequences:
            by_states[f"{start} start"].append((states, value))
        if start == "latent" and any(states == s and sequences != n for s, _, n, _ in points):
            by_sequences[f"{states} states, latent start"].append((sequences, value))
    _draw(by_states, "states", folder / "likelihood-states.png")
    _draw(by_sequences, "training sequences", folder / "likelihood-sequences.png")


def _draw(lines: dict[str, list[tuple[int, float]]], label: str, path: Path) -> None:
    figure = Figure(figsize=(5.0, 3.4), layout="constrained")
    axes = figure.add_subplot(xscale="log", xlabel=label, ylabel="held-out nats per token")
    for name, line in lines.items():
        x, y = zip(*sorted(line), strict=True)
        axes.plot(x, y, marker="o", ms=4, label=name)
    ticks = sorted({x for line in lines.values() for x, _ in line})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
