"""`foretrace judge`: train a judge of one's own."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Train judges.", no_args_is_help=True)


@app.callback()
def options() -> None:
    """Train judges."""


@app.command(epilog="Example: foretrace judge train labelled.jsonl --label toxic --out toxic-judge")
def train(
    data: Annotated[Path, typer.Argument(help="Texts: .jsonl, .csv, .parquet; also .xz, .gz.")],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    text: Annotated[str, typer.Option(help="The column of texts.")] = "text",
    label: Annotated[str, typer.Option(help="The column of labels.")] = "label",
    encoder: Annotated[
        str | None, typer.Option(help="Also use embeddings: a model of sentence-transformers.")
    ] = None,
    encoder_dtype: Annotated[str, typer.Option(help="What it runs in.")] = "float32",
) -> None:
    """Train a linear judge on labelled texts; a tenth of them is kept aside to measure on."""
    from foretrace.evaluate.scoring import held_out_accuracy, train_judge
    from foretrace.evaluate.suite import Table

    table = Table(str(data.resolve()), text)
    rows = table.rows(Path())
    kept, rest = rows[::10], [row for place, row in enumerate(rows) if place % 10]
    judge = train_judge(rest, table, label, encoder, encoder_dtype)
    judge.save(out)
    right = held_out_accuracy(judge, kept, table, label)
    typer.echo(
        f"trained on {len(rest):,} texts; of {len(kept):,} others it names {right:.1%} rightly "
        f"({len(judge.config.classes)} classes); written to {out}"
    )
