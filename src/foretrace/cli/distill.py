"""`foretrace distill`: from a language model's name to an HMM."""

import json
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretrace.cli.device import choose_device
from foretrace.cli.em import ProductDtype
from foretrace.cli.model_loading import quiet
from foretrace.cli.progress import Bars
from foretrace.cli.prompts import read_prompts

if TYPE_CHECKING:
    from foretrace.distill import DistillConfig, LMConfig

EPILOG = (
    "Example: foretrace distill HuggingFaceTB/SmolLM2-135M --states 4096 --sequences 10M --out hmm"
)
drawing = partial(typer.Option, rich_help_panel="Drawing texts from the LM")
training = partial(typer.Option, rich_help_panel="Training the HMM")


class Engine(StrEnum):
    """What draws from the LM."""

    transformers = "transformers"
    vllm = "vllm"


class Start(StrEnum):
    """Where EM starts."""

    latent = "latent"
    random = "random"


def count(given: str | int) -> int:
    """Read a number of things: 120000, 120k, 10M, 1B."""
    text = str(given)
    factors = {"k": 10**3, "m": 10**6, "b": 10**9}
    factor = factors.get(text[-1:].lower(), 1)
    try:
        value = Decimal(text if factor == 1 else text[:-1]) * factor
    except InvalidOperation:
        value = Decimal(-1)
    if not value.is_finite() or value < 1 or value != int(value):
        raise typer.BadParameter(f"'{text}' is no count. Write 120000, 120k, 10M or 1B.")
    return int(value)


def distill(
    model: Annotated[str, typer.Argument(help="A causal LM: a folder, or an id on the hub.")],
    out: Annotated[Path, typer.Option(help="The folder to write; run again to go on in it.")],
    states: Annotated[int, typer.Option(help="Hidden states.")] = 4096,
    sequences: Annotated[
        int, drawing(parser=count, metavar="COUNT", help="Sequences to draw: 120k, 10M.")
    ] = 10_000_000,
    length: Annotated[int, drawing(help="Tokens in a sequence.")] = 32,
    prompts: Annotated[
        Path | None, drawing(help="Prompts to continue: .txt, .jsonl, .csv; also .xz, .gz.")
    ] = None,
    prompted: Annotated[float, drawing(help="Share that continues a prompt.")] = 0.5,
    engine: Annotated[Engine, drawing(help="What draws.")] = Engine.transformers,
    engine_options: Annotated[
        str, drawing(help="JSON, for the engine: '{\"tensor_parallel_size\": 2}'.")
    ] = "{}",
    reader_options: Annotated[
        str | None, drawing(help="JSON, to read hidden states by transformers, if others.")
    ] = None,
    dtype: Annotated[str, drawing(help="What the LM runs in.")] = "auto",
    end_of_text: Annotated[
        str | None, drawing(help="Token that begins and ends texts, if not the tokenizer's.")
    ] = None,
    start: Annotated[Start, training(help="Where EM starts.")] = Start.latent,
    persistence: Annotated[
        float, training(help="Weight of a row's subject in finding states.")
    ] = 0.0,
    epochs: Annotated[int, training(help="Passes of EM over the corpus.")] = 10,
    batch_size: Annotated[int, training(help="Sequences in a step of EM.")] = 4096,
    em_dtype: Annotated[
        ProductDtype, training(help="What products of EM run in.")
    ] = ProductDtype.float32,
    held_out: Annotated[int, training(help="Sequences kept aside to measure on.")] = 4096,
    seed: Annotated[int, typer.Option(help="Decides all that is random.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    plan: Annotated[bool, typer.Option("--plan", help="Only say what it would take.")] = False,
    push_to_hub: Annotated[
        str | None, typer.Option(help="Publish the result under this id on the hub.")
    ] = None,
) -> None:
    """Distil an HMM from a language model: sample, cluster hidden states, train by EM."""
    from foretrace.distill import DistillConfig, EMConfig, LatentConfig, LMConfig
    from foretrace.distill.em.distributed import launched_group
    from foretrace.distill.run import distill as run
    from foretrace.distill.run import publish

    config = DistillConfig(
        num_states=states,
        sequences=sequences,
        length=length,
        prompted=prompted,
        start=start.value,
        latent=LatentConfig(persistence=persistence),
        em=EMConfig(epochs=epochs, batch_size=batch_size, dtype=em_dtype.value, held_out=held_out),
        seed=seed,
    )
    lm = LMConfig(
        engine=engine.value,
        dtype=dtype,
        end_of_text=end_of_text,
        device=choose_device(device),
        options=_options(engine_options),
        reader_options=None if reader_options is None else _options(reader_options),
    )
    texts = [] if prompts is None else read_prompts(prompts)
    quiet()
    if plan:
        _show_plan(model, config, lm, texts, out)
        return
    leads = launched_group().is_leader
    with Bars(visible=leads) as bars:
        hmm = run(
            model, config, out=out, prompts=texts, lm=lm, observe=lambda told: bars.show(*told)
        )
    if leads:
        typer.echo(f"{hmm} written to {out}")
    if push_to_hub is not None and leads:
        typer.echo(f"published as {publish(out, push_to_hub)}")


def _options(text: str) -> dict[str, Any]:
    try:
        options = json.loads(text)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise typer.BadParameter("--engine-options takes JSON: '{\"max_num_seqs\": 512}'.")
    return options


def _show_plan(
    model: str, config: "DistillConfig", lm: "LMConfig", prompts: list[str], out: Path
) -> None:
    from rich.console import Console
    from rich.table import Table

    from foretrace.distill.costs import format_bytes
    from foretrace.distill.plan import plan

    found = plan(model, config, prompts=prompts, lm=lm, folder=out)
    table = Table("stage", "time", "of", title=f"{config.num_states:,} states of {model}")
    for stage in found.stages:
        table.add_row(stage.name, _duration(stage.seconds), stage.work)
    table.add_row("all", _duration(found.seconds), "one process, this machine")
    console = Console()
    console.print(table)
    costs = found.costs
    console.print(
        f"disk: {format_bytes(costs.disk)} at most (corpus {format_bytes(costs.corpus)}, "
        f"hidden states {format_bytes(costs.hidden)} for a while, an HMM "
        f"{format_bytes(costs.table)})\nmemory: the LM and what its engine takes; then "
        f"{format_bytes(costs.latent_memory)} to find a start; then "
        f"{format_bytes(costs.em_memory)} for EM"
    )


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.1f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:,.0f} days"
