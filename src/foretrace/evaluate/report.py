"""Results as a page: one table, who judged, and figures."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretrace import _io
from foretrace.evaluate.plots import draw_groups, draw_trade_off

Results = Mapping[str, Any]


def write_report(results: Results, folder: Path) -> Path:
    """Write `report.md` and its figures into a folder."""
    lines = [f"# {results['suite']}", "", _introduction(results), "", *_table(results), ""]
    lines += _changes(results)
    lines += ["## Judges", "", *_judges(results)]
    if any(method["plan"]["curve"] for method in results["methods"].values()):
        image = folder / "trade-off.png"
        draw_trade_off(results, image)
        lines += ["", "## Trade-off", "", f"![{_first(results)} against perplexity]({image.name})"]
        lines += ["", *_at_equal_perplexity(results)]
    if results["rival"] in results["methods"]:
        lines += ["", *_groups(results, folder)]
    path = folder / "report.md"
    with _io.atomic_write(path) as scratch:
        scratch.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def _introduction(results: Results) -> str:
    sampling = results["sampling"]
    return (
        f"{results['lm']} with an HMM of {results['hmm']['states']:,} states; "
        f"{results['prompts']:,} prompts, {sampling['continuations']} continuations of "
        f"{sampling['max_new_tokens']} tokens each, top-p {sampling['top_p']:g}, seed "
        f"{sampling['seed']}. In brackets 95% intervals, by resampling prompts. Perplexity is the "
        f"bare LM's own, of the continuation given the prompt."
    )


def _table(results: Results) -> list[str]:
    """Make a table of all figures: a row for every method."""
    names = _figures(results)
    lines = [_row("method", *names, "cost"), _row(*["---"] * (len(names) + 2))]
    for method, own in results["methods"].items():
        cells = [_cell(own["figures"].get(name)) for name in names]
        lines.append(_row(method, *cells, f"{own['cost']:.2f}"))
    return lines


def _changes(results: Results) -> list[str]:
    """Make a table of changes against the baseline, on the same prompts."""
    names = _figures(results)
    lines = [f"## Against {results['baseline']}", ""]
    lines += [_row("method", *names), _row(*["---"] * (len(names) + 1))]
    for method, own in results["methods"].items():
        if method == results["baseline"]:
            continue
        cells = [_change(own["figures"].get(name, {})) for name in names]
        lines.append(_row(method, *cells))
    return [*lines, ""]


def _at_equal_perplexity(results: Results) -> list[str]:
    """Make a table of each curve against the points of the others."""
    lines = [
        f"At equal perplexity: {_first(results)} at the best point of a curve (straight between "
        f"methods) whose perplexity is not above the rival's, less that of the rival.",
        "",
        _row("curve", "rival", "difference"),
        _row(*["---"] * 3),
    ]
    for each in results["at equal perplexity"]:
        told = "the whole curve costs more"
        if each["difference"] is not None:
            value, low, high = each["difference"]
            told = f"{value:+.3f} [{low:+.3f}, {high:+.3f}]"
        lines.append(_row(each["curve"], each["rival"], told))
    return lines


def _groups(results: Results, folder: Path) -> list[str]:
    """Count the groups on which each method is ahead of the rival, and draw one against it."""
    rival, methods = results["rival"], results["methods"]
    lines = [f"## Ahead of {rival}, group by group", ""]
    judges = list(methods[rival]["groups"])
    lines += [_row("method", *judges), _row(*["---"] * (len(judges) + 1))]
    for name, own in methods.items():
        if name != rival:
            counts = [
                _ahead(own["groups"][judge], methods[rival]["groups"][judge]) for judge in judges
            ]
            lines.append(_row(name, *(f"{ahead} of {total}" for ahead, total in counts)))
    image = folder / "groups.png"
    draw_groups(results, image)
    return [*lines, "", f"![Every group, against {rival}]({image.name})"]


def _ahead(own: Mapping[str, float], other: Mapping[str, float]) -> tuple[int, int]:
    return sum(own[group] > other[group] for group in other), len(other)


def _judges(results: Results) -> list[str]:
    lines = []
    for name, facts in results["judges"].items():
        told = ", ".join(f"{key} {_told(value)}" for key, value in facts.items())
        lines.append(f"- **{name}**: {told}")
    dropped = {
        f"{method}: {name}": figure["dropped"]
        for method, own in results["methods"].items()
        for name, figure in own["figures"].items()
        if figure["dropped"]
    }
    if dropped:
        listed = "; ".join(f"{name} {count}" for name, count in dropped.items())
        lines += ["", f"Continuations left out (blank, not judged, or beyond measure): {listed}."]
    return lines


def _figures(results: Results) -> list[str]:
    return list(results["methods"][results["baseline"]]["figures"])


def _first(results: Results) -> str:
    return _figures(results)[0]


def _cell(figure: Mapping[str, float] | None) -> str:
    if figure is None or figure["value"] is None:
        return ""
    return f"{figure['value']:.3g} [{figure['low']:.3g}, {figure['high']:.3g}]"


def _change(figure: Mapping[str, Any]) -> str:
    """Tell a change in percent; where the baseline is next to nothing, as a difference."""
    if "relative" not in figure:
        return ""
    value, low, high = figure["relative"]
    if low is not None:
        return f"{100 * value:+.1f}% [{100 * low:+.1f}, {100 * high:+.1f}]"
    value, low, high = figure["difference"]
    if low is None:
        return ""
    return f"{value:+.3g} [{low:+.3g}, {high:+.3g}]"


def _told(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else f"{value}"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"
