"""`foretrace hmm`: look at an HMM, convert a published one, make one sparse."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from foretrace.hmm import HMM

app = typer.Typer(
    help="Look at hidden Markov models, convert published ones, make them sparse.",
    no_args_is_help=True,
)

# What is told of how an HMM was made, unless all is asked for.
TOLD = (
    "converted_from",
    "sequences",
    "epochs",
    "held_out_log_likelihood",
    "bigram_log_likelihood",
    "unigram_log_likelihood",
    "nats_per_token",
    "tolerance",
)
Source = Annotated[str, typer.Argument(help="A folder, or a repository of the hub.")]
Out = Annotated[Path, typer.Option(help="The folder to write.")]


class StoredDtype(StrEnum):
    """What tables can be stored as."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


Dtype = Annotated[StoredDtype | None, typer.Option(help="Store the tables as this.")]


@app.command(epilog="Example: foretrace hmm show my-hmm")
def show(
    source: Source,
    everything: Annotated[bool, typer.Option("--all", help="Also how it was made.")] = False,
) -> None:
    """Print what an HMM is, how good it is, and where it comes from."""
    from foretrace.hmm import HMM

    _describe(HMM.from_pretrained(source), everything)


@app.command(epilog="Example: foretrace hmm convert their-checkpoint --out my-hmm --dtype bfloat16")
def convert(source: Source, out: Out, dtype: Dtype = None) -> None:
    """Convert a checkpoint of TRACE or Ctrl-G to foretrace's format."""
    from foretrace.hmm.convert import read_published

    _save(read_published(source), out, dtype)


@app.command(epilog="Example: foretrace hmm sparsify my-hmm --out my-small-hmm --tolerance 1e-3")
def sparsify(
    source: Source,
    out: Out,
    tolerance: Annotated[
        float, typer.Option(help="Log-likelihood to give up at most, in nats per token.")
    ] = 1e-3,
    dtype: Dtype = None,
) -> None:
    """Make an HMM's emission sparse: megabytes instead of gigabytes, at a measured loss."""
    from foretrace.hmm import HMM

    dense = HMM.from_pretrained(source)
    sparse = dense.sparsify(tolerance)
    _save(sparse, out, dtype)
    if sparse.nbytes > dense.nbytes:
        typer.echo(
            "The sparse form is the larger one: this emission is not sparse. Raise --tolerance, or "
            "stay with the dense form."
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
        if everything or name in TOLD:
            table.add_row(name.replace("_", " "), _in_words(name, value))
    Console().print(table)


def _in_words(name: str, value: object) -> str:
    """Write a figure with its unit."""
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_in_words('', each)}" for key, each in value.items())
    text = f"{value:.4g}" if isinstance(value, float) else f"{value}"
    return f"{text} nats per token" if name.endswith("log_likelihood") else text
