"""`foretrace hmm`: inspect, convert and sparsify HMMs."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from foretrace.hmm import HMM

app = typer.Typer(
    help="Inspect hidden Markov models, convert published ones, make them sparse.",
    no_args_is_help=True,
)

# Facts about the distillation that `show` prints without --all.
SHOWN_FACTS = (
    "method",
    "converted_from",
    "sequences",
    "epochs",
    "held_out_log_likelihood",
    "bigram_log_likelihood",
    "unigram_log_likelihood",
    "nats_per_token",
    "tolerance",
)
Source = Annotated[str, typer.Argument(help="A folder, or a hub id.")]
Out = Annotated[Path, typer.Option(help="Output folder.")]


class StoredDtype(StrEnum):
    """The dtype of stored tables."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


Dtype = Annotated[StoredDtype | None, typer.Option(help="Dtype of the stored tables.")]


@app.command(epilog="Example: foretrace hmm show my-hmm")
def show(
    source: Source,
    everything: Annotated[
        bool, typer.Option("--all", help="Also print every fact about its distillation.")
    ] = False,
) -> None:
    """Print the size, quality and origin of an HMM."""
    from foretrace.hmm import HMM

    _describe(HMM.from_pretrained(source), everything)


@app.command(epilog="Example: foretrace hmm convert their-checkpoint --out my-hmm --dtype bfloat16")
def convert(source: Source, out: Out, dtype: Dtype = None) -> None:
    """Convert a checkpoint of TRACE or Ctrl-G to the format of foretrace."""
    from foretrace.hmm.convert import read_published

    _save(read_published(source), out, dtype)


@app.command(epilog="Example: foretrace hmm sparsify my-hmm --out my-small-hmm --tolerance 1e-3")
def sparsify(
    source: Source,
    out: Out,
    tolerance: Annotated[
        float, typer.Option(help="Maximum loss of log-likelihood, in nats per token.")
    ] = 1e-3,
    dtype: Dtype = None,
) -> None:
    """Make the emission matrix of an HMM sparse, and report the loss of log-likelihood."""
    from foretrace.hmm import HMM

    dense = HMM.from_pretrained(source)
    sparse = dense.sparsify(tolerance)
    _save(sparse, out, dtype)
    if sparse.nbytes > dense.nbytes:
        typer.echo(
            "The sparse form is larger than the dense one. Raise --tolerance, or keep the dense "
            "form."
        )


def _save(hmm: "HMM", out: Path, dtype: StoredDtype | None) -> None:
    import torch

    hmm = hmm if dtype is None else hmm.to(dtype=getattr(torch, dtype.value))
    hmm.save_pretrained(out)
    _describe(hmm)
    size = sum(file.stat().st_size for file in out.iterdir()) / 1e6
    typer.echo(f"written to {out} ({size:.1f} MB)")


def _describe(hmm: "HMM", everything: bool = False) -> None:
    from rich.console import Console
    from rich.table import Table

    from foretrace.hmm.probability import dtype_name

    table = Table(show_header=False, box=None)
    table.add_row("states", f"{hmm.num_states:,}")
    table.add_row("vocabulary", f"{hmm.vocab_size:,}")
    table.add_row("transition", hmm.transition.kind)
    table.add_row("emission", hmm.emission.kind)
    table.add_row("stored as", dtype_name(hmm.dtype))
    table.add_row("parameters", f"{hmm.nbytes / 1e6:,.1f} MB")
    config = hmm.config
    table.add_row("source model", config.source_model or "unknown")
    table.add_row("end of text", ", ".join(map(str, config.eos_token_ids)) or "none")
    table.add_row("tokenizer", config.tokenizer_fingerprint or "unknown")
    facts = {**config.distillation, **(config.sparsification or {})}
    for name, value in facts.items():
        if everything or name in SHOWN_FACTS:
            table.add_row(name.replace("_", " "), _format_fact(name, value))
    Console().print(table)


def _format_fact(name: str, value: object) -> str:
    """Format a value with its unit."""
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_format_fact('', entry)}" for key, entry in value.items())
    text = f"{value:.4g}" if isinstance(value, float) else f"{value}"
    return f"{text} nats per token" if name.endswith("log_likelihood") else text
