"""What a fit looks like: the scores before and after the transform, and how close it comes."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from foretrace import _io
from foretrace.attribute.config import AttributeConfig
from foretrace.errors import InvalidInputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAMES = {"scores": "scores", "targets": "after the transform", "fitted": "fitted"}


def draw(config: AttributeConfig, path: Path) -> None:
    """Draw the histograms of the held-out texts beside the calibration, as a PNG."""
    facts = config.fit
    if "histograms" not in facts:
        raise InvalidInputError(
            f"'{config.name}' was not fitted: it was composed or given its weights, and there "
            f"is nothing to draw."
        )
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidInputError(
            "Drawing needs matplotlib: pip install 'foretrace[transformers]'."
        ) from error
    figure = Figure(figsize=(9.6, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    _histograms(left, facts["histograms"])
    _calibration(right, facts["calibration"])
    figure.suptitle(f"{config.name}: {facts['held_out_texts']:,} held-out texts")
    with _io.atomic_write(path) as scratch:
        figure.savefig(scratch, format="png", dpi=120)


def _histograms(axes: "Axes", histograms: dict[str, list[int]]) -> None:
    for key, name in NAMES.items():
        edges = np.linspace(0, 1, len(histograms[key]) + 1)
        # Filled, the scores stay visible where the transform leaves them as they are.
        style = {"fill": True, "color": "lightgrey"} if key == "scores" else {"linewidth": 1.5}
        axes.stairs(histograms[key], edges, label=name, **style)
    axes.set_yscale("symlog")
    axes.set_xlabel("probability of having the attribute")
    axes.set_ylabel("texts")
    axes.legend()


def _calibration(axes: "Axes", bins: list[dict[str, float]]) -> None:
    axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
    predicted, target = [one["predicted"] for one in bins], [one["target"] for one in bins]
    most = max(one["texts"] for one in bins)
    sizes = [10 + 90 * one["texts"] / most for one in bins]
    axes.scatter(predicted, target, s=sizes)
    axes.set_xlabel("predicted")
    axes.set_ylabel("mean target")
