"""`foretrace calibrate`: find the strengths of an attribute's levels, and what they do to texts."""

from pathlib import Path
from typing import Annotated

import typer

from foretrace.cli import goal_options
from foretrace.cli.loading import load_lm, read_prompts
from foretrace.cli.report import print_report
from foretrace.cli.terminal import ProgressBars

EPILOG = (
    "Example: foretrace calibrate my-lm --hmm my-hmm --attribute attributes/nontoxic.safetensors"
)


def calibrate(
    model: goal_options.Model,
    attribute: Annotated[
        str, typer.Option(help="An attribute file, or the name of one in --attributes.")
    ],
    hmm: goal_options.OptionalHMM = None,
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
    """Find the strengths of an attribute's levels, measure what they do, and store both."""
    from foretrace.attribute import Attribute
    from foretrace.engines.transformers.verdict import calibrate_and_report

    if column is not None and prompts is None:
        raise typer.BadParameter("--column is an option of --prompts, which is missing.")
    budgets = _parse_budgets(budget or [])
    file = _find_file(attribute, attributes)
    texts = read_prompts(prompts, column) if prompts else []
    lm, tokenizer = load_lm(model, dtype, device)
    loaded_hmm = goal_options.load_or_measure_hmm(hmm, lm, tokenizer)
    fingerprint = loaded_hmm.config.tokenizer_fingerprint
    loaded = Attribute.load(file, tokenizer_fingerprint=fingerprint)
    probe = goal_options.probe_for([loaded], goal_options.probe_builder(lm, tokenizer))
    source = {
        "model": model,
        "hmm": hmm or goal_options.UNIGRAM,
        "prompts": f"{prompts}" if prompts else "openings of the language model",
    }
    with ProgressBars(resumes=False) as bars:
        measured = calibrate_and_report(
            lm,
            tokenizer,
            loaded_hmm,
            loaded,
            prompts=texts,
            budgets=budgets,
            probe=probe,
            max_new_tokens=max_new_tokens,
            seed=seed,
            source=source,
            on_progress=bars.update,
        )
    measured.save(file)
    assert measured.report is not None
    for warning in measured.report.warnings:
        typer.echo(f"Warning: {warning}")
    print_report(measured.report)
    typer.echo(f"written to {file}")


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
