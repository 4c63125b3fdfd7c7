"""`foretrace fidelity`: measure how well an HMM predicts the attributes of an LM's texts."""

from pathlib import Path
from typing import Annotated, Any

import typer

from foretrace.cli import goal_options
from foretrace.cli.model_loading import load_lm
from foretrace.cli.progress import ProgressBars
from foretrace.cli.prompts import read_prompts

EPILOG = (
    "Example: foretrace fidelity my-lm --hmm my-hmm --goal nontoxic --prompts prompts.jsonl "
    "--out fidelity"
)


def fidelity(
    model: goal_options.Model,
    hmm: goal_options.HMMSource,
    goal: Annotated[
        str, typer.Option(help="Attributes joined by & | ~, such as 'nontoxic & ~formal'.")
    ],
    prompts: Annotated[Path, typer.Option(help="A file of prompts: .jsonl, .csv, .txt, ...")],
    out: Annotated[Path, typer.Option(help="Output folder.")],
    column: Annotated[
        str | None, typer.Option(help="The column of --prompts. Default: `prompt`, else `text`.")
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 100,
    rollouts: Annotated[int, typer.Option(min=2, help="Rollouts per prompt.")] = 64,
    attributes: goal_options.Attributes = Path(),
    transform: Annotated[
        str, typer.Option(metavar="SCALE,SHIFT", help="The paper's transform, in the plot.")
    ] = "1,0",
    probe: Annotated[
        bool, typer.Option("--probe", help="Also fit a linear probe on the LM's hidden states.")
    ] = False,
    seed: goal_options.Seed = 0,
    device: goal_options.Device = "auto",
    dtype: goal_options.Dtype = "auto",
) -> None:
    """Compare the HMM's expected attribute probability with rollouts of the LM."""
    from foretrace import _io
    from foretrace.engines.transformers import stop_tokens
    from foretrace.evaluate.fidelity import measure_fidelity
    from foretrace.evaluate.generations import encode_with_bos
    from foretrace.evaluate.plots import draw_fidelity

    plotted = goal_options.parse_transform(transform)
    settings = goal_options.GoalSettings([1.0])
    lm, tokenizer = load_lm(model, dtype, device)
    loaded_hmm = goal_options.load_hmm(hmm, tokenizer, lm.device)
    loaded = goal_options.load_goals(loaded_hmm, tokenizer, attributes, [goal], settings, 64)
    eos_token_ids = loaded_hmm.config.eos_token_ids
    texts = read_prompts(prompts, column)[:count]
    with ProgressBars(resumes=False) as bars:
        result = measure_fidelity(
            lm,
            loaded.goals[0].lookahead,
            encode_with_bos(tokenizer, texts, eos_token_ids[0] if eos_token_ids else None),
            ends=stop_tokens(lm.generation_config, eos_token_ids),
            rollouts=rollouts,
            seed=seed,
            probe=probe,
            observe=lambda done, total: bars.update("rollouts", done, total, "prompts"),
        )
    summary = {"goal": goal, "prompts": len(texts), "rollouts": rollouts, **result.summary()}
    _io.write_json(out / "fidelity.json", summary)
    draw_fidelity(result, plotted, out / "fidelity.png", goal)
    _print(summary)
    typer.echo(f"written to {out}: fidelity.json, fidelity.png")


def _print(summary: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    across_prefixes = Table(
        "remaining tokens", "rank correlation", "expected", "observed", box=None
    )
    for remaining, facts in summary["across prefixes"].items():
        values = (facts["spearman"], facts["expected"], facts["observed"])
        across_prefixes.add_row(f"{remaining}", *(f"{value:.3f}" for value in values))
    headings = ("within a prefix: tokens", "concordance", "probe", "prefixes", "pairs")
    within_prefix = Table(*headings, box=None)
    for length, facts in summary["within a prefix"].items():
        within_prefix.add_row(
            f"2 to {length + 1}",
            f"{facts['concordance']:.3f}",
            f"{facts['probe']:.3f}" if "probe" in facts else "",
            f"{facts['prefixes']}",
            f"{facts['pairs']:,}",
        )
    console = Console()
    console.print(across_prefixes)
    console.print(within_prefix)
