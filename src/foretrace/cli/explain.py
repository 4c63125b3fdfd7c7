"""`foretrace explain`: why each token of a text, as a table and as a page."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretrace.cli import goal_options as goals_of
from foretrace.cli.model_loading import load_lm

if TYPE_CHECKING:
    from foretrace.cli.token_table import Account
    from foretrace.engines.transformers.explain import Candidate

EPILOG = (
    "Example: foretrace explain my-lm --hmm my-hmm --goal nontoxic "
    "--prompt 'The other driver said' --html why.html"
)


def explain(
    model: goals_of.Model,
    hmm: goals_of.HMMSource,
    goal: goals_of.Expressions,
    prompt: Annotated[str, typer.Option(help="What the text continues.")] = "",
    text: Annotated[
        str | None, typer.Option(help="The finished text after the prompt; else one is written.")
    ] = None,
    attributes: goals_of.Attributes = Path(),
    strength: goals_of.Strengths = [1.0],  # noqa: B006  typer copies it
    shift: goals_of.Shifts = [0.0],  # noqa: B006
    candidates: Annotated[int, typer.Option(min=1, help="How many to show at each place.")] = 5,
    html: Annotated[Path | None, typer.Option(help="Write this page, instead of a table.")] = None,
    max_new_tokens: goals_of.MaxNewTokens = 40,
    horizon: goals_of.Horizon = 64,
    neutral_end: goals_of.NeutralEnd = False,
    temperature: goals_of.Temperature = 1.0,
    top_p: goals_of.TopP = 1.0,
    seed: goals_of.Seed = 0,
    device: goals_of.Device = "auto",
    dtype: goals_of.Dtype = "auto",
) -> None:
    """Show why each token: the LM's probability, the EAP, and the steered probability."""
    from foretrace.cli.explain_page import Heading, write_page
    from foretrace.cli.text_generator import Writer
    from foretrace.cli.token_table import account_for
    from foretrace.engines.transformers import encode_prompts

    lm, tokenizer = load_lm(model, dtype, device)
    known = goals_of.load_hmm(hmm, tokenizer, lm.device)
    goals = goals_of.load_goals(
        known, tokenizer, attributes, goal, strength, shift, horizon, neutral_end
    )
    if text is None:
        options = goals_of.sampling(temperature, top_p) | {"max_new_tokens": max_new_tokens}
        (found,) = Writer(lm, tokenizer, goals, options).write([prompt], seed)
        given, written = found.prompt, found.tokens
    else:
        (given,) = encode_prompts(tokenizer, [prompt], goals)
        written = tokenizer(text, add_special_tokens=False).input_ids
    account = account_for(
        lm,
        tokenizer,
        given,
        written,
        goals,
        max_new_tokens=max_new_tokens if text is None else None,
        candidates=candidates,
    )
    if html is None:
        _print(account, goal)
    else:
        typer.secho(prompt, bold=True, nl=False)
        typer.echo("".join(account.pieces))
        write_page(html, account, Heading(prompt, goal, strength, shift))
        typer.echo(f"written to {html}")


def _print(account: "Account", goals: Sequence[str]) -> None:
    """Print a section for each place: what was written, and what else might have been."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text  # tokens and goals may look like markup

    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("", "token", "LM", *(f"EAP {goal}" for goal in goals), "steered"):
        table.add_column(Text(name), justify="left" if name in ("", "token") else "right")
    for choice in account.choices:
        for each in choice.candidates:
            chosen = each is choice.written
            cells = [">" if chosen else "", repr(account.shown(each.token)), *_figures(each)]
            table.add_row(*map(Text, cells), style="bold" if chosen else "dim")
        table.add_row()
    Console().print(table)


def _figures(candidate: "Candidate") -> list[str]:
    return [f"{each:.4f}" for each in (candidate.lm, *candidate.eap, candidate.steered)]
