"""How well an attribute does on texts that it was not fitted to."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

BINS = 20


def ranking(probabilities: Array, scores: Array) -> float | None:
    """Give the AUC: how often a text that has the attribute gets more than one that has not.

    A text has it if its score is 0.5 or more; where that puts all on one side, if it is above the
    median. None if that does not part them either.
    """
    from sklearn.metrics import roc_auc_score

    for has_it in (scores >= 0.5, scores > np.median(scores)):
        if 0 < has_it.sum() < len(has_it):
            return float(roc_auc_score(has_it, probabilities))
    return None


def figures(probabilities: Array, scores: Array, targets: Array) -> dict[str, Any]:
    """Tell how close the probabilities are to the targets, and how all three are spread."""
    bins = calibration(probabilities, targets)
    off = sum(part["texts"] * abs(part["predicted"] - part["target"]) for part in bins)
    return {
        "calibration_error": off / len(scores),
        "calibration": bins,
        "histograms": {
            "scores": histogram(scores),
            "targets": histogram(targets),
            "fitted": histogram(probabilities),
        },
    }


def histogram(probabilities: Array) -> list[int]:
    """Count probabilities in equal bins over [0, 1]."""
    return [int(count) for count in np.histogram(probabilities, BINS, (0.0, 1.0))[0]]


def calibration(probabilities: Array, targets: Array) -> list[dict[str, float]]:
    """Compare predictions and targets in equal bins of the prediction; empty bins are left out."""
    which = np.minimum((probabilities * BINS).astype(int), BINS - 1)
    return [
        {
            "texts": int((which == part).sum()),
            "predicted": float(probabilities[which == part].mean()),
            "target": float(targets[which == part].mean()),
        }
        for part in np.unique(which)
    ]
