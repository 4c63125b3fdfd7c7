"""Prints the report of an attribute: a table of its levels, texts, and the verdict."""

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from foretrace.attribute import AttributeReport


def print_report(report: "AttributeReport") -> None:
    """Print the levels of a report, texts at the strongest level, and the verdict."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text  # keeps texts from being parsed as markup

    levels = Table(
        "level", "strength", "nats per token", "probability", "perplexity, bare = 1", box=None
    )
    for level in report.levels:
        error = f"\u00b1 {2 * level.standard_error:.2f}"
        levels.add_row(
            level.level,
            f"{level.strength:.3g}",
            f"{level.price:.3f}",
            f"{level.before:.2f} -> {level.after:.2f} {error}",
            f"{level.perplexity_ratio:.2f} \u00b1 {2 * level.perplexity_error:.2f}",
        )
    console, strongest = Console(), report.levels[-1]
    console.print(levels)
    typer.echo(f"probability by {report.judge}; {report.num_prompts} prompts")
    texts = Table(show_header=False, box=None)
    for pair in strongest.pairs:
        for name, text in zip(("prompt", "bare", strongest.level), pair, strict=True):
            texts.add_row(name, Text(" ".join(text.split())))
        texts.add_section()
    console.print(texts)
    typer.echo(report.verdict)
