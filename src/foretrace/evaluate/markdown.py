"""Tables in Markdown."""

from collections.abc import Mapping
from typing import Any


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
