"""`foretrace explain`: show why each token was chosen, as a table or as an HTML page."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretrace.cli import goal_options
from foretrace.cli.model_loading import load_lm

if TYPE_CHECKING:
    from foretrace.cli.token_table import TokenTable
    from foretrace.engines.transformers.explain import Candidate

EPILOG = (
    "Example: foretrace explain my-lm --hmm my-hmm --goal nontoxic "
    "--prompt 'The other driver said' --html why.html"
)


def explain(
    model: goal_options.Model,
    hmm: goal_options.HMMSource,
    goal: goal_options.Expressions,
    prompt: Annotated[str, typer.Option(help="The prompt.")] = "",
    text: Annotated[
        str | None, typer.Option(help="Explain this continuation. Default: generate one.")
    ] = None,
    attributes: goal_options.Attributes = Path(),
    level: goal_options.Levels = None,
    strength: goal_options.Strengths = None,
    transform: goal_options.Transforms = None,
    after: goal_options.After = None,
    window: goal_options.Window = None,
    candidates: Annotated[
        int, typer.Option(min=1, help="Number of candidate tokens per position.")
    ] = 5,
    html: Annotated[
        Path | None, typer.Option(help="Write an HTML page to this file instead of a table.")
    ] = None,
    max_new_tokens: goal_options.MaxNewTokens = 40,
    horizon: goal_options.Horizon = 64,
    neutral_end: goal_options.NeutralEnd = True,
    temperature: goal_options.Temperature = 1.0,
    top_p: goal_options.TopP = 1.0,
    seed: goal_options.Seed = 0,
    device: goal_options.Device = "auto",
    dtype: goal_options.Dtype = "auto",
) -> None:
    """Show the LM's probability, the EAP, the steered probability and the price of each token."""
    from foretrace.cli.explain_page import PageHeader, write_page
    from foretrace.cli.text_generator import TextGenerator
    from foretrace.cli.token_table import explain_tokens
    from foretrace.engines.transformers import encode_prompts

    settings = goal_options.check_settings(strength, level, transform, neutral_end, len(goal))
    lm, tokenizer = load_lm(model, dtype, device)
    loaded_hmm = goal_options.load_hmm(hmm, tokenizer, lm.device)
    goals = goal_options.load_goals(
        loaded_hmm,
        tokenizer,
        attributes,
        goal,
        settings,
        horizon,
        after=after,
        window=window,
        merged=False,
    )
    if text is None:
        sampling = goal_options.sampling_options(temperature, top_p)
        generator = TextGenerator(
            lm, tokenizer, goals, sampling | {"max_new_tokens": max_new_tokens}
        )
        (generation,) = generator.generate([prompt], seed)
        prompt_ids, token_ids = generation.prompt_ids, generation.token_ids
    else:
        (prompt_ids,) = encode_prompts(tokenizer, [prompt], goals.goals)
        token_ids = tokenizer(text, add_special_tokens=False).input_ids
    table = explain_tokens(
        lm,
        tokenizer,
        prompt_ids,
        token_ids,
        goals.goals,
        max_new_tokens=max_new_tokens if text is None else None,
        candidates=candidates,
    )
    if html is None:
        _print(table, goal)
    else:
        typer.secho(prompt, bold=True, nl=False)
        typer.echo("".join(table.pieces))
        write_page(html, table, PageHeader(prompt, goal, settings.description))
        typer.echo(f"written to {html}")


def _print(table: "TokenTable", goals: Sequence[str]) -> None:
    """Print the candidates of each position, and the price of steering there.

    The chosen token is marked with `>`.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text  # keeps tokens and goals from being parsed as markup

    grid = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("", "token", "LM", *(f"EAP {goal}" for goal in goals), "steered", "price"):
        grid.add_column(Text(name), justify="left" if name in ("", "token") else "right")
    for choice in table.choices:
        for candidate in choice.candidates:
            chosen = candidate is choice.written
            token_text = repr(table.token_text(candidate.token))
            cells = [">" if chosen else "", token_text, *_probabilities(candidate)]
            cells.append(f"{choice.price:.4f}" if chosen else "")
            grid.add_row(*map(Text, cells), style="bold" if chosen else "dim")
        grid.add_row()
    console = Console()
    console.print(grid)
    console.print(f"mean price: {table.mean_price:.4f} nats per token")


def _probabilities(candidate: "Candidate") -> list[str]:
    return [f"{value:.4f}" for value in (candidate.lm, *candidate.eap, candidate.steered)]
