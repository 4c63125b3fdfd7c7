"""`foretrace attribute`: inspect fitted attributes."""

from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretrace.cli.loading import load_tokenizer
from foretrace.cli.report import print_report

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedTokenizerBase

    from foretrace.attribute import Attribute

app = typer.Typer(help="Inspect attributes.", no_args_is_help=True)
MIN_HELD_OUT_TEXTS = 50  # an AUC on fewer texts is not reliable


@app.callback()
def options() -> None:
    """Inspect attributes."""


@app.command(epilog="Example: foretrace attribute show nontoxic.safetensors --tokenizer my-lm")
def show(
    file: Annotated[Path, typer.Argument(help="A file written by `foretrace fit`.")],
    tokenizer: Annotated[
        str | None, typer.Option(help="The LM's tokenizer, to show tokens as text.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Number of tokens to list.")] = 20,
    plot: Annotated[
        Path | None, typer.Option(help="Also write a plot of the fit to this PNG file.")
    ] = None,
) -> None:
    """Print the size, the quality and the tokens of largest effect of an attribute."""
    from foretrace.attribute import Attribute
    from foretrace.attribute.fitting.plot import draw
    from foretrace.vocabulary import fingerprint

    loaded_tokenizer = None if tokenizer is None else load_tokenizer(tokenizer)
    expected = None if loaded_tokenizer is None else fingerprint(loaded_tokenizer.get_vocab())
    attribute = Attribute.load(file, tokenizer_fingerprint=expected)
    describe(attribute, loaded_tokenizer, tokens)
    if attribute.report is None:
        typer.echo("No verdict: `foretrace calibrate` measures what it changes in an LM's texts.")
    if plot is not None:
        draw(attribute.config, plot)


def describe(
    attribute: "Attribute", tokenizer: "PreTrainedTokenizerBase | None", tokens: int = 20
) -> None:
    """Print how an attribute was fitted, its quality, and the `tokens` tokens of largest effect.

    The tokens of evidence for and against are in columns of their own, with their rewards.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text  # keeps names and tokens from being parsed as markup

    table = Table(show_header=False, box=None)
    table.add_row("attribute", Text(attribute.name))
    if len(attribute.terms.tokens) or not attribute.evidence:
        table.add_row("terms", f"{len(attribute.terms)}")
        table.add_row("tokens with weight", f"{len(attribute.terms.tokens):,}")
    for evidence in attribute.evidence:
        table.add_row("tokens with reward", f"{len(evidence.tokens):,}")
    if (context := attribute.context) is not None:
        head = f"for the LM whose head is {context.fingerprint[:15]}"
        table.add_row(
            "context reward", f"rank {len(context)}, {context.width:,} dimensions, {head}"
        )
    for name, value in _fit_facts(attribute):
        table.add_row(name, Text(value))
    console = Console()
    console.print(table)

    def shown(token: int) -> Text:
        return Text(f"{token}" if tokenizer is None else repr(tokenizer.decode([token])))

    if attribute.evidence:
        both = Table("for", "reward", "against", "reward", box=None)
        rewards = _rewards(attribute)
        ascending = sorted(rewards, key=lambda token: rewards[token])
        pairs = zip_longest(
            [token for token in reversed(ascending) if rewards[token] > 0][:tokens],
            [token for token in ascending if rewards[token] < 0][:tokens],
        )
        for pair in pairs:
            cells: list[str | Text] = []
            for token in pair:
                cells += ("", "") if token is None else (shown(token), f"{rewards[token]:+.2f}")
            both.add_row(*cells)
        console.print(both)
    else:
        strongest = Table("token", "probability of the attribute", box=None)
        for token, probability in attribute.top_tokens(tokens):
            strongest.add_row(shown(token), f"{probability:.3f}")
        console.print(strongest)
    for warning in attribute.config.fit.get("warnings", ()):
        typer.echo(f"Warning: {warning}")
    if attribute.report is not None:
        print_report(attribute.report)


def _rewards(attribute: "Attribute") -> dict[int, float]:
    """Return the sum of each token's rewards, over all evidence of the attribute."""
    sums: dict[int, float] = {}
    for evidence in attribute.evidence:
        pairs = zip(evidence.tokens.tolist(), evidence.rewards.tolist(), strict=True)
        for token, reward in pairs:
            sums[token] = sums.get(token, 0.0) + reward
    return sums


def _format_auc(auc: float | None, texts: int) -> str:
    """Format an AUC; mark it if it is measured on too few texts."""
    if auc is None:
        return "unknown"
    return f"{auc:.4f}" + (
        "" if texts >= MIN_HELD_OUT_TEXTS else f" (of {texts} texts, too few for an estimate)"
    )


def _fit_facts(attribute: "Attribute") -> list[tuple[str, str]]:
    """Return how the attribute was fitted, and how well."""
    facts = attribute.config.fit
    if "auc" not in facts:  # composed, or built from weights
        return []
    auc, transform = facts["auc"], facts["transform"]
    origin = "chosen" if facts["transform_chosen"] else "given"
    source = facts.get("source", {})
    return [
        ("fitted on", ", ".join(f"{key} {value}" for key, value in source.items())),
        ("objective", facts["objective"] + (", by absence" if facts["by_absence"] else "")),
        ("transform", f"scale {transform['scale']:g}, shift {transform['shift']:g} ({origin})"),
        ("texts", f"{facts['texts']:,}, and {facts['held_out_texts']:,} held out"),
        ("windows", f"{facts['windows']:,}, and {facts['held_out_windows']:,} held out"),
        ("AUC, held out", _format_auc(auc, facts["held_out_texts"])),
        *_comparison(facts),
        ("calibration error", f"{facts['calibration_error']:.4f}"),
    ]


def _comparison(facts: "Mapping[str, Any]") -> list[tuple[str, str]]:
    """Return how a product and evidence compare, if both were fitted."""
    rows = []
    if facts.get("right_first") is not None:
        rows.append(("right label first, held out", f"{facts['right_first']:.1%}"))
    if "reason" in facts:
        rows.append(("choice", str(facts["reason"])))
    return rows
