"""Metrics of a fit on held-out texts."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

BINS = 20


def auc(probabilities: Array, scores: Array) -> float | None:
    """Compute the AUC: how often a text with the attribute ranks above a text without it.

    A text has the attribute if its score is at least 0.5. If all texts are on one side, the median
    score is the threshold. None if the median does not separate them either.
    """
    from sklearn.metrics import roc_auc_score

    for positive in (scores >= 0.5, scores > np.median(scores)):
        if 0 < positive.sum() < len(positive):
            return float(roc_auc_score(positive, probabilities))
    return None


def held_out_metrics(probabilities: Array, scores: Array, targets: Array) -> dict[str, Any]:
    """Compute the calibration error, the calibration curve and histograms."""
    bins = calibration(probabilities, targets)
    error = sum(entry["texts"] * abs(entry["predicted"] - entry["target"]) for entry in bins)
    return {
        "calibration_error": error / len(scores),
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
    """Average predictions and targets in equal bins of the prediction; skip empty bins."""
    bin_index = np.minimum((probabilities * BINS).astype(int), BINS - 1)
    return [
        {
            "texts": int((bin_index == i).sum()),
            "predicted": float(probabilities[bin_index == i].mean()),
            "target": float(targets[bin_index == i].mean()),
        }
        for i in np.unique(bin_index)
    ]
