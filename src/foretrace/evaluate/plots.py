"""Plots of an evaluation."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from foretrace import _io
from foretrace.attribute import LogitAffine
from foretrace.evaluate.fidelity import Fidelity

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_trade_off(results: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Plot the first metric against perplexity; a line joins the methods of a curve."""
    from matplotlib.figure import Figure

    methods = results["methods"]
    metric = next(iter(methods[results["baseline"]]["figures"]))
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    curves: dict[str, list[Mapping[str, Any]]] = {}
    for name, method in methods.items():
        curves.setdefault(method["plan"]["curve"] or name, []).append(method["figures"])
    for curve, members in curves.items():
        values = [figures[metric] for figures in members]
        axes.errorbar(
            [figures["perplexity"]["value"] for figures in members],
            [y["value"] for y in values],
            yerr=[
                [y["value"] - y["low"] for y in values],
                [y["high"] - y["value"] for y in values],
            ],
            marker="o",
            markersize=4,
            capsize=2,
            linewidth=1,
            label=curve,
        )
    use_log_scale(axes)
    axes.set_xlabel("perplexity")
    axes.set_ylabel(metric)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    _save(figure, path)


def use_log_scale(axes: "Axes") -> None:
    """Use a logarithmic x-axis with plain numbers: one bad method must not hide all others."""
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())


def draw_groups(results: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Plot the score of every group by the first judge: each method against the rival."""
    from matplotlib.figure import Figure

    methods, rival = results["methods"], results["rival"]
    judge, rival_scores = next(iter(methods[rival]["groups"].items()))
    figure = Figure(figsize=(5.5, 5.5), layout="constrained")
    axes = figure.add_subplot()
    for name, method in methods.items():
        if name != rival:
            scores = [method["groups"][judge][group] for group in rival_scores]
            axes.scatter(list(rival_scores.values()), scores, s=12, alpha=0.7, label=name)
    axes.axline((0, 0), slope=1, color="grey", linewidth=1)
    axes.set_xlabel(f"{judge}: {rival}")
    axes.set_ylabel(judge)
    axes.legend(frameon=False, fontsize=8)
    _save(figure, path)


def draw_fidelity(
    fidelity: Fidelity, transform: LogitAffine, path: str | os.PathLike[str], name: str
) -> None:
    """Plot expectations against outcomes, and the EAP before and after the goal's transform."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for ahead, facts in fidelity.summary()["across prefixes"].items():
        bins = facts["calibration"]
        left.plot(
            [one_bin["expected"] for one_bin in bins],
            [one_bin["observed"] for one_bin in bins],
            marker="o",
            markersize=4,
            label=f"next {ahead} tokens, rank correlation {facts['spearman']:.2f}",
        )
    left.axline((0, 0), slope=1, color="grey", linewidth=1)
    left.set_xlabel(f"{name}: expected by the HMM")
    left.set_ylabel("mean over the LM's continuations")
    left.legend(frameon=False, fontsize=8)
    before = torch.tensor(fidelity.eap, dtype=torch.float64)
    for label, values in (("EAP", before), ("after the transform", transform(before))):
        right.hist(values.numpy(), bins=40, range=(0, 1), alpha=0.6, label=label)
    right.set_xlabel("EAP of every first token of the LM's continuations")
    right.legend(frameon=False, fontsize=8)
    _save(figure, path)


def _save(figure: Any, path: str | os.PathLike[str]) -> None:
    with _io.atomic_write(Path(path)) as scratch:
        figure.savefig(scratch, format="png", dpi=150)
