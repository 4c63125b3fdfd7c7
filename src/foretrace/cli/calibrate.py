"""`foretrace calibrate`: find the strengths of an attribute's levels with the language model."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretrace.cli import goal_options
from foretrace.cli.loading import load_lm, read_prompts
from foretrace.cli.terminal import ProgressBars

if TYPE_CHECKING:
    from foretrace.engines.transformers.calibration import CalibratedLevel, SteeredRuns
    from foretrace.steering import CompiledGoal

EPILOG = (
    "Example: foretrace calibrate my-lm --hmm my-hmm --attribute attributes/nontoxic.safetensors"
)


def calibrate(
    model: goal_options.Model,
    hmm: goal_options.HMMSource,
    attribute: Annotated[
        str, typer.Option(help="An attribute file, or the name of one in --attributes.")
    ],
    attributes: goal_options.Attributes = Path(),
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="A file of prompts: .jsonl, .csv, .txt, ... Default: openings that the LM writes."
        ),
    ] = None,
    column: Annotated[
        str | None, typer.Option(help="The column of --prompts. Default: `prompt`, else `text`.")
    ] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LEVEL=NATS",
            help="The price of a level in nats per token; repeatable.",
            show_default="mild=0.02, medium=0.06, strong=0.15",
        ),
    ] = None,
    max_new_tokens: goal_options.MaxNewTokens = 24,
    seed: goal_options.Seed = 0,
    device: goal_options.Device = "auto",
    dtype: goal_options.Dtype = "auto",
) -> None:
    """Find the strengths of an attribute's levels, and write them into its file."""
    from foretrace.attribute import Attribute
    from foretrace.engines.transformers import calibration as library
    from foretrace.engines.transformers import encode_prompts, stop_tokens

    if column is not None and prompts is None:
        raise typer.BadParameter("--column is an option of --prompts, which is missing.")
    budgets = _parse_budgets(budget or [])
    file = _find_file(attribute, attributes)
    texts = read_prompts(prompts, column)[: library.NUM_ROWS] if prompts else []
    lm, tokenizer = load_lm(model, dtype, device)
    loaded_hmm = goal_options.load_hmm(hmm, tokenizer, lm.device)
    fingerprint = loaded_hmm.config.tokenizer_fingerprint
    loaded = Attribute.load(file, tokenizer_fingerprint=fingerprint)
    ends = stop_tokens(lm.generation_config, loaded_hmm.config.eos_token_ids)
    if texts:
        encoded = encode_prompts(tokenizer, texts)
    else:
        start = library.start_token(tokenizer, loaded_hmm)
        encoded = library.write_openings(lm, start, ends=ends, seed=seed)
    runs = library.SteeredRuns(lm, encoded, ends=ends, max_new_tokens=max_new_tokens, seed=seed)
    with ProgressBars(resumes=False) as bars:
        levels = library.calibrate(_ShownRuns(runs, bars), loaded_hmm, loaded, budgets)
    record = {
        "model": model,
        "hmm": hmm,
        "prompts": f"{prompts}" if prompts else "openings of the language model",
        "rows": len(runs.prompts),
        "max_new_tokens": max_new_tokens,
        "temperature": 1.0,
        "top_p": 1.0,
        "seed": seed,
        "levels": {name: level._asdict() for name, level in levels.items()},
    }
    config = replace(
        loaded.config,
        levels={name: level.strength for name, level in levels.items()},
        fit={**loaded.config.fit, "calibration": record},
    )
    replace(loaded, config=config).save(file)
    _print(levels)
    typer.echo(f"written to {file}")


class _ShownRuns:
    """Runs of the language model, with a progress bar for each."""

    def __init__(self, runs: "SteeredRuns", bars: ProgressBars) -> None:
        self.runs, self.bars, self.max_new_tokens = runs, bars, runs.max_new_tokens

    def price(self, goal: "CompiledGoal") -> float:
        """Return the mean price of a goal in nats per generated token."""
        stage, total = goal.name, self.max_new_tokens
        self.runs.on_progress = lambda done: self.bars.update(stage, done, total, "tokens")
        price = self.runs.price(goal)
        self.bars.update(stage, total, total, "tokens", f"{price:.4f} nats per token")
        return price


def _parse_budgets(options: list[str]) -> dict[str, float]:
    """Return the budget of every level: the default, or the NATS of an option LEVEL=NATS."""
    from foretrace.lookahead.levels import BUDGETS

    budgets = dict(BUDGETS)
    for option in options:
        name, _, nats = option.partition("=")
        try:
            budgets[name] = float(nats)
        except ValueError:
            budgets[name] = 0.0
        if name not in BUDGETS or not 0 < budgets[name] < float("inf"):
            raise typer.BadParameter(
                f"--budget is LEVEL=NATS, such as medium=0.06: one of {', '.join(BUDGETS)} "
                f"and a number above 0, not '{option}'."
            )
    return budgets


def _find_file(attribute: str, folder: Path) -> Path:
    """Return the file of an attribute, from its path or its name in a folder."""
    from foretrace.attribute import AttributeStore, as_expression, parse

    if Path(attribute).is_file():
        return Path(attribute)
    store = AttributeStore(folder)
    if attribute not in store:
        parse(as_expression(attribute)).build(store)  # raises an error with a similar name
    return store.path(attribute)


def _print(levels: "Mapping[str, CalibratedLevel]") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("level", "strength", "budget, nats per token", "reached", box=None)
    for name, level in levels.items():
        values = f"{level.strength:.3g}", f"{level.budget:.3f}", f"{level.price:.3f}"
        table.add_row(name, *values)
    Console().print(table)
