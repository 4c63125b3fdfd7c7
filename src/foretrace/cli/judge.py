"""`foretrace judge`: train a judge on labelled texts."""

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
    out: Annotated[Path, typer.Option(help="Output folder.")],
    text: Annotated[str, typer.Option(help="The column of texts.")] = "text",
    label: Annotated[str, typer.Option(help="The column of labels.")] = "label",
    encoder: Annotated[
        str | None, typer.Option(help="Also use embeddings of this sentence-transformers model.")
    ] = None,
    encoder_dtype: Annotated[str, typer.Option(help="Dtype of the encoder.")] = "float32",
) -> None:
    """Train a linear judge on nine tenths of labelled texts, and evaluate it on the rest."""
    from foretrace.evaluate.scoring import held_out_accuracy, train_judge
    from foretrace.evaluate.suite import Table

    table = Table(str(data.resolve()), text)
    rows = table.rows(Path())
    held_out, rest = rows[::10], [row for index, row in enumerate(rows) if index % 10]
    judge = train_judge(rest, table, label, encoder, encoder_dtype)
    judge.save(out)
    accuracy = held_out_accuracy(judge, held_out, table, label)
    typer.echo(
        f"trained on {len(rest):,} texts; accuracy {accuracy:.1%} on {len(held_out):,} others "
        f"({len(judge.config.classes)} classes); written to {out}"
    )
