"""Figures of an evaluation."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from foretrace import _io
from foretrace.attribute import LogitAffine
from foretrace.evaluate.fidelity import Fidelity


def draw_trade_off(results: Mapping[str, Any], path: Path) -> None:
    """Draw the first figure against perplexity; methods of one curve are joined."""
    from matplotlib.figure import Figure

    methods = results["methods"]
    name = next(iter(methods[results["baseline"]]["figures"]))
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    curves: dict[str, list[str]] = {}
    for method, own in methods.items():
        curves.setdefault(own["plan"]["curve"] or method, []).append(method)
    for curve, members in curves.items():
        points = [(_at(methods[each], "perplexity"), _at(methods[each], name)) for each in members]
        axes.errorbar(
            [x["value"] for x, _ in points],
            [y["value"] for _, y in points],
            yerr=[
                [y["value"] - y["low"] for _, y in points],
                [y["high"] - y["value"] for _, y in points],
            ],
            marker="o",
            markersize=4,
            capsize=2,
            linewidth=1,
            label=curve,
        )
    axes.set_xlabel("perplexity")
    axes.set_ylabel(name)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    _save(figure, path)


def draw_groups(results: Mapping[str, Any], path: Path) -> None:
    """Draw every group's score by the first judge: each method's against the rival's."""
    from matplotlib.figure import Figure

    methods, rival = results["methods"], results["rival"]
    judge, theirs = next(iter(methods[rival]["groups"].items()))
    figure = Figure(figsize=(5.5, 5.5), layout="constrained")
    axes = figure.add_subplot()
    for name, own in methods.items():
        if name != rival:
            ours = [own["groups"][judge][group] for group in theirs]
            axes.scatter(list(theirs.values()), ours, s=12, alpha=0.7, label=name)
    axes.axline((0, 0), slope=1, color="grey", linewidth=1)
    axes.set_xlabel(f"{judge}: {rival}")
    axes.set_ylabel(judge)
    axes.legend(frameon=False, fontsize=8)
    _save(figure, path)


def draw_fidelity(fidelity: Fidelity, transform: LogitAffine, path: Path, name: str) -> None:
    """Draw expectations against outcomes, and EAP before and after the goal's transform."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for ahead, facts in fidelity.summary()["across prefixes"].items():
        bins = facts["calibration"]
        left.plot(
            [each["expected"] for each in bins],
            [each["observed"] for each in bins],
            marker="o",
            markersize=4,
            label=f"{ahead} tokens to come, rank correlation {facts['spearman']:.2f}",
        )
    left.axline((0, 0), slope=1, color="grey", linewidth=1)
    left.set_xlabel(f"{name}: expected by the HMM")
    left.set_ylabel("mean over what the LM wrote")
    left.legend(frameon=False, fontsize=8)
    before = torch.tensor(fidelity.eap, dtype=torch.float64)
    for label, values in (("EAP", before), ("after the transform", transform(before))):
        right.hist(values.numpy(), bins=40, range=(0, 1), alpha=0.6, label=label)
    right.set_xlabel("of every first token that the LM wrote")
    right.legend(frameon=False, fontsize=8)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    with _io.atomic_write(path) as scratch:
        figure.savefig(scratch, format="png", dpi=150)


def _at(method: Mapping[str, Any], name: str) -> Mapping[str, float]:
    found: Mapping[str, float] = method["figures"][name]
    return found
