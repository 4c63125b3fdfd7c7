"""`foretrace attribute`: look at fitted attributes."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretrace.cli.model_loading import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from foretrace.attribute import Attribute

app = typer.Typer(help="Look at attributes.", no_args_is_help=True)
FEW = 50  # held-out texts: a figure on fewer is chance


@app.callback()
def options() -> None:
    """Look at attributes."""


@app.command(epilog="Example: foretrace attribute show nontoxic.safetensors --tokenizer my-lm")
def show(
    file: Annotated[Path, typer.Argument(help="A file that `foretrace fit` wrote.")],
    tokenizer: Annotated[
        str | None, typer.Option(help="Of the LM that it steers, to show tokens as text.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="How many tokens to list.")] = 20,
    plot: Annotated[Path | None, typer.Option(help="Also draw the fit, as this PNG.")] = None,
) -> None:
    """Print what an attribute is, how well it does, and which tokens decide it."""
    from foretrace.attribute import Attribute
    from foretrace.attribute.fitting.plot import draw
    from foretrace.vocabulary import fingerprint

    loaded = None if tokenizer is None else load_tokenizer(tokenizer)
    expected = None if loaded is None else fingerprint(loaded.get_vocab())
    attribute = Attribute.load(file, tokenizer_fingerprint=expected)
    describe(attribute, loaded, tokens)
    if plot is not None:
        draw(attribute.config, plot)


def describe(
    attribute: "Attribute", tokenizer: "PreTrainedTokenizerBase | None", tokens: int = 20
) -> None:
    """Print an attribute's figures and strongest tokens."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text  # names and tokens may look like markup

    table = Table(show_header=False, box=None)
    table.add_row("attribute", Text(attribute.name))
    table.add_row("terms", f"{len(attribute.terms)}")
    table.add_row("tokens with weight", f"{len(attribute.terms.tokens):,}")
    for name, value in _fitted(attribute):
        table.add_row(name, Text(value))
    console = Console()
    console.print(table)
    strongest = Table("token", "probability of the attribute", box=None)
    for token, probability in attribute.top_tokens(tokens):
        text = f"{token}" if tokenizer is None else repr(tokenizer.decode([token]))
        strongest.add_row(Text(text), f"{probability:.3f}")
    console.print(strongest)


def _ranking(auc: float | None, texts: int) -> str:
    """Tell how well texts are ranked, and whether there are enough of them to tell."""
    if auc is None:
        return "unknown"
    return f"{auc:.4f}" + ("" if texts >= FEW else f" (of {texts} texts, too few to tell)")


def _fitted(attribute: "Attribute") -> list[tuple[str, str]]:
    """Tell how it was fitted, and how well."""
    facts = attribute.config.fit
    if "auc" not in facts:  # composed, or given its weights
        return []
    auc, transform = facts["auc"], facts["transform"]
    how = "chosen" if facts["transform_chosen"] else "given"
    source = facts.get("source", {})
    return [
        ("fitted on", ", ".join(f"{key} {value}" for key, value in source.items())),
        ("objective", facts["objective"] + (", by absence" if facts["by_absence"] else "")),
        ("transform", f"scale {transform['scale']:g}, shift {transform['shift']:g} ({how})"),
        ("texts", f"{facts['texts']:,}, and {facts['held_out_texts']:,} held out"),
        ("windows", f"{facts['windows']:,}, and {facts['held_out_windows']:,} held out"),
        ("AUC, held out", _ranking(auc, facts["held_out_texts"])),
        ("calibration error", f"{facts['calibration_error']:.4f}"),
    ]
