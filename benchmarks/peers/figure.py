"""The figure of a suite: both judges against each of the three costs, with 95% bands."""

from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretrace import _io
from foretrace.evaluate.metrics import Interval, Measurement, interval
from foretrace.evaluate.plots import use_log_scale
from peers.comparisons import COSTS, CURVE, EXCESS, PERPLEXITY, PRICE, Measured

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINEAR_BELOW = {EXCESS: 0.1, PRICE: 0.02}  # the scale is logarithmic above
LABELS = {
    PERPLEXITY: "perplexity",
    EXCESS: "excess cross-entropy, nats per token",
    PRICE: "price, nats per token",
}


def draw_costs(measured: Measured, names: Mapping[str, str], path: Path) -> None:
    """Plot the metric of every judge against every cost.

    Args:
        measured: The measurements of the suite.
        names: The label of every judge's metric.
        path: The image to write.
    """
    from matplotlib.figure import Figure

    rows = len(measured.judges)
    figure = Figure(figsize=(13, 3.8 * rows + 0.6), layout="constrained")
    panels = figure.subplots(rows, len(COSTS), squeeze=False)
    styles = {name: _style(index, name) for index, name in enumerate(_curves(measured))}
    for row, judge in zip(panels, measured.judges, strict=True):
        for axes, cost in zip(row, COSTS, strict=True):
            _draw_panel(axes, measured, judge, cost, styles)
            axes.set_xlabel(LABELS[cost])
        row[0].set_ylabel(names[judge])
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    with _io.atomic_write(path) as scratch:
        figure.savefig(scratch, format="png", dpi=90)


def _curves(measured: Measured) -> dict[str, list[str]]:
    """Return the methods of every curve. Foretrace's begins with the baseline."""
    curves: dict[str, list[str]] = {measured.baseline: [measured.baseline], CURVE: measured.points}
    for name in measured.rivals:
        curves.setdefault(measured.curves[name] or name, []).append(name)
    return curves


def _style(index: int, curve: str) -> dict[str, Any]:
    """Return the style of a curve; there are ten colours."""
    style = {"color": f"C{index % 10}", "linestyle": "-" if index < 10 else "--", "label": curve}
    return {**style, "zorder": 4 if curve == CURVE else 2, "linewidth": 2 if curve == CURVE else 1}


def _draw_panel(
    axes: "Axes", measured: Measured, judge: str, cost: str, styles: Mapping[str, dict[str, Any]]
) -> None:
    """Draw a line with a band for every curve, and a point with its interval for a single one."""
    values = {name: interval(one) for name, one in measured.judges[judge].items()}
    costs = measured.costs[cost]
    for curve, methods in _curves(measured).items():
        known = [name for name in methods if _is_known(costs.get(name), values[name])]
        x, points = [costs[name].value for name in known], [values[name] for name in known]
        style = styles[curve]
        if len(known) < 2:
            bars = [
                [point.value - point.low for point in points],
                [point.high - point.value for point in points],
            ]
            y = [point.value for point in points]
            axes.errorbar(x, y, yerr=bars, marker="o", markersize=4, capsize=2, **style)
            continue
        axes.plot(x, [point.value for point in points], marker="o", markersize=4, **style)
        # A polygon instead of fill_between: the cost need not grow from point to point.
        outline = [point.low for point in points] + [point.high for point in reversed(points)]
        axes.fill([*x, *reversed(x)], outline, color=style["color"], alpha=0.12, linewidth=0)
    if cost == PERPLEXITY:
        use_log_scale(axes)
    else:
        axes.set_xscale("symlog", linthresh=LINEAR_BELOW[cost])
    axes.grid(alpha=0.3)


def _is_known(cost: Measurement | None, value: Interval) -> bool:
    return cost is not None and all(map(isfinite, (cost.value, *value)))
