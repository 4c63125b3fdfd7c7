"""The report of an evaluation: tables, judges and plots as a Markdown page."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretrace import _io
from foretrace.evaluate.blocks import BLOCK, block_starts
from foretrace.evaluate.plots import draw_groups, draw_trade_off

Results = Mapping[str, Any]


def write_report(results: Results, folder: str | os.PathLike[str]) -> Path:
    """Write `report.md` and its plots into a folder; return the path of the report."""
    folder = Path(folder)
    lines = [f"# {results['suite']}", "", _introduction(results), "", *_metric_table(results), ""]
    lines += _strength_list(results)
    lines += _change_table(results)
    lines += _equal_price_table(results)
    lines += _block_table(results)
    lines += ["## Judges", "", *_judge_list(results)]
    if any(method["plan"]["curve"] for method in results["methods"].values()):
        image = folder / "trade-off.png"
        draw_trade_off(results, image)
        first_metric = _metric_names(results)[0]
        lines += ["", "## Trade-off", "", f"![{first_metric} against perplexity]({image.name})"]
        lines += ["", *_equal_perplexity_table(results)]
    if results["rival"] in results["methods"]:
        lines += ["", *_group_section(results, folder)]
    path = folder / "report.md"
    with _io.atomic_write(path) as scratch:
        scratch.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def _introduction(results: Results) -> str:
    sampling = results["sampling"]
    others = "".join(
        f", and {name} of {facts['states']:,}" for name, facts in results["other hmms"].items()
    )
    return (
        f"{results['lm']} with an HMM of {results['hmm']['states']:,} states{others}; "
        f"{results['prompts']:,} prompts, {sampling['continuations']} continuations of "
        f"{sampling['max_new_tokens']} tokens each, top-p {sampling['top_p']:g}, seed "
        f"{sampling['seed']}. Brackets hold 95% confidence intervals, by resampling prompts. "
        f"The unsteered LM computes the perplexity of the continuation given the prompt. The "
        f"price of steering is the KL divergence of the steered from the bare next-token "
        f"distribution, in nats per generated token."
    )


def _metric_table(results: Results) -> list[str]:
    """Build the table of all metrics, with a row for every method."""
    names = _metric_names(results)
    lines = table_head("method", *names, "cost")
    for method, facts in results["methods"].items():
        cells = [format_figure(facts["figures"].get(name)) for name in names]
        lines.append(table_row(method, *cells, f"{facts['cost']:.2f}"))
    return lines


def _change_table(results: Results) -> list[str]:
    """Build the table of changes against the baseline on the same prompts."""
    names = _metric_names(results)
    lines = [f"## Against {results['baseline']}", "", *table_head("method", *names)]
    for method, facts in results["methods"].items():
        if method == results["baseline"]:
            continue
        cells = [_format_change(facts["figures"].get(name, {})) for name in names]
        lines.append(table_row(method, *cells))
    return [*lines, ""]


def _equal_price_table(results: Results) -> list[str]:
    """Build the table of methods against those whose price they match."""
    if not results["at equal price"]:
        return []
    names = _metric_names(results)
    lines = ["## At equal price", "", *table_head("method", "against", *names)]
    for comparison in results["at equal price"]:
        cells = [_format_change(comparison["figures"].get(name, {})) for name in names]
        lines.append(table_row(comparison["method"], comparison["matched"], *cells))
    return [*lines, ""]


def _block_table(results: Results) -> list[str]:
    """Build the table of metrics by position, with their ratios to the baseline's."""
    baseline, limit = results["baseline"], results["sampling"]["max_new_tokens"]
    blocks = results["methods"][baseline]["blocks"]
    if not blocks:
        return []
    lines = [
        "## By position",
        "",
        f"In blocks of {BLOCK} tokens; in parentheses, the ratio to {baseline}. Perplexity is over "
        f"all tokens of a block, given everything before. Reached is the share of texts that have "
        f"not ended before the block.",
        "",
        *table_head("method", "tokens", *blocks[0]),
    ]
    for method, facts in results["methods"].items():
        for start, block in zip(block_starts(limit), facts["blocks"], strict=True):
            cells = [_format_ratio(figure, method == baseline) for figure in block.values()]
            last = min(start + BLOCK, limit)
            lines.append(table_row(method, f"{start + 1} to {last}", *cells))
    return [*lines, ""]


def _format_ratio(figure: Mapping[str, Any], is_baseline: bool) -> str:
    """Format a value, and the ratio of another method's to the baseline's."""
    if is_baseline or figure["value"] is None:
        return format_figure(figure)
    value, low, high = figure["ratio"]
    if low is None:
        return f"{figure['value']:.3g}"
    return f"{figure['value']:.3g} ({value:.2f} [{low:.2f}, {high:.2f}])"


def _strength_list(results: Results) -> list[str]:
    """List the strengths that were found by their price."""
    calibration = results["calibration"]
    lines = [
        f"- {attribute}: {', '.join(f'{level} {value:.3g}' for level, value in levels.items())}"
        for attribute, levels in calibration["levels"].items()
    ]
    lines += [
        f"- {method}: {matched['factor']:.3g} times the strengths of its level, at which it costs "
        f"{matched['price']:.3g} nats per token on the prompts of the calibration, like "
        f"{results['methods'][method]['plan']['match_price']}"
        for method, matched in calibration["matched"].items()
    ]
    return ["## Strengths of levels", "", *lines, ""] if lines else []


def _equal_perplexity_table(results: Results) -> list[str]:
    """Build the table of each curve against the points of the others."""
    lines = [
        f"At equal perplexity: {_metric_names(results)[0]} at the best point of a curve (linear "
        f"between methods) whose perplexity is not above the rival's, minus the rival's value.",
        "",
        *table_head("curve", "rival", "difference"),
    ]
    for comparison in results["at equal perplexity"]:
        difference = "the curve does not reach down to this perplexity"
        if comparison["difference"] is not None:
            value, low, high = comparison["difference"]
            difference = f"{value:+.3f} [{low:+.3f}, {high:+.3f}]"
        lines.append(table_row(comparison["curve"], comparison["rival"], difference))
    return lines


def _group_section(results: Results, folder: Path) -> list[str]:
    """Count the groups in which each method is ahead of the rival, and plot them."""
    rival, methods = results["rival"], results["methods"]
    judges = list(methods[rival]["groups"])
    lines = [f"## Ahead of {rival}, group by group", "", *table_head("method", *judges)]
    for name, method in methods.items():
        if name != rival:
            counts = [
                _count_ahead(method["groups"][judge], methods[rival]["groups"][judge])
                for judge in judges
            ]
            lines.append(table_row(name, *(f"{ahead} of {total}" for ahead, total in counts)))
    image = folder / "groups.png"
    draw_groups(results, image)
    return [*lines, "", f"![Every group, against {rival}]({image.name})"]


def _count_ahead(scores: Mapping[str, float], rival: Mapping[str, float]) -> tuple[int, int]:
    return sum(scores[group] > rival[group] for group in rival), len(rival)


def _judge_list(results: Results) -> list[str]:
    """List the judges with their agreement, and the continuations that were dropped."""
    lines = []
    for name, facts in results["judges"].items():
        description = ", ".join(f"{key} {_format_fact(value)}" for key, value in facts.items())
        lines.append(f"- **{name}**: {description}")
    dropped = {
        f"{method}: {name}": figure["dropped"]
        for method, facts in results["methods"].items()
        for name, figure in facts["figures"].items()
        if figure["dropped"]
    }
    if dropped:
        counts = "; ".join(f"{name} {count}" for name, count in dropped.items())
        lines += [
            "",
            f"Continuations left out (blank, not judged, or of perplexity 10,000 or more): "
            f"{counts}.",
        ]
    return lines


def _metric_names(results: Results) -> list[str]:
    return list(results["methods"][results["baseline"]]["figures"])


def _format_change(figure: Mapping[str, Any]) -> str:
    """Format a change in percent; as a difference where the baseline is close to 0."""
    if "relative" not in figure:
        return ""
    value, low, high = figure["relative"]
    if low is not None:
        return f"{100 * value:+.1f}% [{100 * low:+.1f}, {100 * high:+.1f}]"
    value, low, high = figure["difference"]
    if low is None:
        return ""
    return f"{value:+.3g} [{low:+.3g}, {high:+.3g}]"


def _format_fact(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else f"{value}"


def table_head(*cells: str) -> list[str]:
    """Return the two lines that begin a table."""
    return [table_row(*cells), table_row(*["---"] * len(cells))]


def table_row(*cells: str) -> str:
    """Return the line of a row."""
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def format_figure(figure: Mapping[str, Any] | None) -> str:
    """Format a figure of the results with its confidence interval; an unknown one is empty."""
    if figure is None or figure["value"] is None:
        return ""
    if figure["low"] is None:
        return f"{figure['value']:.3g}"
    return f"{figure['value']:.3g} [{figure['low']:.3g}, {figure['high']:.3g}]"
