"""`foretrace generate`: write continuations, steered, and bare beside them if asked."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretrace.cli import goal_options as goals_of
from foretrace.cli.model_loading import load_lm
from foretrace.cli.prompts import read_prompts
from foretrace.cli.text_generator import Writer, Written

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

EPILOG = (
    "Example: foretrace generate my-lm --hmm my-hmm --goal 'nontoxic & ~formal' "
    "--prompt 'The other driver said' --compare"
)


def generate(
    model: goals_of.Model,
    hmm: goals_of.HMMSource,
    goal: Annotated[list[str] | None, goals_of.GOAL] = None,
    must_contain: goals_of.MustContain = None,
    must_not_contain: goals_of.MustNotContain = None,
    prompt: Annotated[list[str] | None, typer.Option(help="A text to continue.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="More of them: .jsonl, .csv, .parquet, .txt; also .xz, .gz.")
    ] = None,
    column: Annotated[
        str | None, typer.Option(help="The column of --prompts; else `prompt`, or `text`.")
    ] = None,
    attributes: goals_of.Attributes = Path(),
    strength: goals_of.Strengths = [1.0],  # noqa: B006  typer copies it
    shift: goals_of.Shifts = [0.0],  # noqa: B006
    compare: Annotated[bool, typer.Option(help="Print bare and steered side by side.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per prompt.")] = False,
    max_new_tokens: goals_of.MaxNewTokens = 40,
    horizon: goals_of.Horizon = 64,
    neutral_end: goals_of.NeutralEnd = False,
    temperature: goals_of.Temperature = 1.0,
    top_p: goals_of.TopP = 1.0,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts at once; 1 streams.")] = 1,
    seed: goals_of.Seed = 0,
    device: goals_of.Device = "auto",
    dtype: goals_of.Dtype = "auto",
) -> None:
    """Write what follows prompts, steered toward goals."""
    if column is not None and prompts is None:
        raise typer.BadParameter("--column is of --prompts, which is not given.")
    asked = [*(prompt or []), *(read_prompts(prompts, column) if prompts else [])]
    if not (goal or must_contain or must_not_contain):
        raise typer.BadParameter("Give a --goal, or what a text --must-contain or must not.")
    if not asked:
        raise typer.BadParameter("Give something to continue: --prompt TEXT, or --prompts FILE.")
    lm, tokenizer = load_lm(model, dtype, device)
    known = goals_of.load_hmm(hmm, tokenizer, lm.device)
    goals = goals_of.load_goals(
        known,
        tokenizer,
        attributes,
        goal or [],
        strength,
        shift,
        horizon,
        neutral_end,
        must_contain,
        must_not_contain,
    )
    options = goals_of.sampling(temperature, top_p) | {"max_new_tokens": max_new_tokens}
    writer = Writer(lm, tokenizer, goals, options)
    show = _as_json if as_json else _side_by_side if compare else _in_turn
    for start in range(0, len(asked), batch_size):
        show(writer, asked[start : start + batch_size], seed + start, compare)


def _in_turn(writer: Writer, prompts: Sequence[str], seed: int, _: bool) -> None:
    """Print each prompt and what follows it, as it is written."""
    shown = ""

    def more(text: str) -> None:
        nonlocal shown
        typer.echo(text.removeprefix(shown), nl=False)
        shown = text

    alone = len(prompts) == 1
    if alone:
        typer.secho(prompts[0], bold=True, nl=False)
    texts = writer.write(prompts, seed, show=more if alone else None)
    if alone:
        typer.echo(texts[0].text.removeprefix(shown) + "\n")
        return
    for prompt, written in zip(prompts, texts, strict=True):
        typer.secho(prompt, bold=True, nl=False)
        typer.echo(written.text + "\n")


def _side_by_side(writer: Writer, prompts: Sequence[str], seed: int, _: bool) -> None:
    """Print bare and steered texts in two columns, as they are written."""
    from rich.live import Live

    with Live() as live:
        bare = writer.write(
            prompts,
            seed,
            steered=False,
            show=lambda text: live.update(_columns(prompts, [Written(text, ())], [])),
        )
        steered = writer.write(
            prompts,
            seed,
            show=lambda text: live.update(_columns(prompts, bare, [Written(text, ())])),
        )
        live.update(_columns(prompts, bare, steered))
    if not live.console.is_terminal:
        typer.echo()  # where nothing moves, the last line is not ended
    if [each.text for each in bare] == [each.text for each in steered]:
        typer.echo("The goal changed nothing here. Try more --strength, or another --seed.")


def _columns(
    prompts: Sequence[str], bare: Sequence[Written], steered: Sequence[Written]
) -> "Table":
    from itertools import zip_longest

    from rich.table import Table

    table = Table("bare", "steered", expand=True, show_lines=True)
    for column in table.columns:
        column.ratio = 1
    for prompt, *cells in zip_longest(prompts, bare, steered):
        table.add_row(*(_cell(prompt, cell or Written("", ())) for cell in cells))
    return table


def _cell(prompt: str, written: Written) -> "Text":
    from rich.text import Text  # texts may look like markup

    cell = Text.assemble((prompt, "dim"), written.text)
    if written.probability:
        figures = ", ".join(f"{each:.3f}" for each in written.probability)
        cell.append(f"\nattribute probability {figures}", "cyan")
    return cell


def _as_json(writer: Writer, prompts: Sequence[str], seed: int, compare: bool) -> None:
    """Print an object per prompt."""
    steered = writer.write(prompts, seed)
    bare = writer.write(prompts, seed, steered=False) if compare else [None] * len(prompts)
    for prompt, own, other in zip(prompts, steered, bare, strict=True):
        row: dict[str, Any] = {"prompt": prompt, **_row(own)}
        if other is not None:
            row["bare"] = _row(other)
        typer.echo(json.dumps(row, ensure_ascii=False))


def _row(written: Written) -> dict[str, Any]:
    return {"text": written.text, "probability": written.probability}
