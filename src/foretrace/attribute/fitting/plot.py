"""Plot a fit: the scores before and after the transform, and the calibration."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from foretrace import _io
from foretrace.attribute.config import AttributeConfig
from foretrace.errors import InvalidInputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LABELS = {"scores": "scores", "targets": "after the transform", "fitted": "fitted"}


def draw(config: AttributeConfig, path: Path) -> None:
    """Plot the histograms and the calibration of the held-out texts, as a PNG."""
    record = config.fit
    if "histograms" not in record:
        raise InvalidInputError(
            f"'{config.name}' has no fit to plot: it was combined from others or made from "
            f"weights. Plot a fitted attribute."
        )
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidInputError(
            "Plots need matplotlib: pip install 'foretrace[transformers]'."
        ) from error
    figure = Figure(figsize=(9.6, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    _plot_histograms(left, record["histograms"])
    _plot_calibration(right, record["calibration"])
    figure.suptitle(f"{config.name}: {record['held_out_texts']:,} held-out texts")
    with _io.atomic_write(path) as scratch:
        figure.savefig(scratch, format="png", dpi=120)


def _plot_histograms(axes: "Axes", histograms: dict[str, list[int]]) -> None:
    for key, label in LABELS.items():
        edges = np.linspace(0, 1, len(histograms[key]) + 1)
        # Filled scores stay visible where the transform leaves them unchanged.
        style = {"fill": True, "color": "lightgrey"} if key == "scores" else {"linewidth": 1.5}
        axes.stairs(histograms[key], edges, label=label, **style)
    axes.set_yscale("symlog")
    axes.set_xlabel("probability of having the attribute")
    axes.set_ylabel("texts")
    axes.legend()


def _plot_calibration(axes: "Axes", bins: list[dict[str, float]]) -> None:
    axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
    predicted, target = [entry["predicted"] for entry in bins], [entry["target"] for entry in bins]
    largest = max(entry["texts"] for entry in bins)
    sizes = [10 + 90 * entry["texts"] / largest for entry in bins]
    axes.scatter(predicted, target, s=sizes)
    axes.set_xlabel("predicted")
    axes.set_ylabel("mean target")
