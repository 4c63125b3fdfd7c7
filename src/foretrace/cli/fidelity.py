"""`foretrace fidelity`: what lookahead is worth, for an LM, its HMM and a goal."""

from pathlib import Path
from typing import Annotated, Any

import typer

from foretrace.cli import goal_options as options
from foretrace.cli.model_loading import load_lm
from foretrace.cli.progress import Bars
from foretrace.cli.prompts import read_prompts

EPILOG = (
    "Example: foretrace fidelity my-lm --hmm my-hmm --goal nontoxic --prompts prompts.jsonl "
    "--out fidelity"
)


def fidelity(
    model: options.Model,
    hmm: options.HMMSource,
    goal: Annotated[str, typer.Option(help="Attributes joined by & | ~, as 'nontoxic & ~formal'.")],
    prompts: Annotated[Path, typer.Option(help="Texts to go on from: .jsonl, .csv, .txt, ...")],
    out: Annotated[Path, typer.Option(help="The folder to write figures into.")],
    column: Annotated[str | None, typer.Option(help="The column; else `prompt` or `text`.")] = None,
    count: Annotated[int, typer.Option(min=1, help="How many of the prompts.")] = 100,
    rollouts: Annotated[int, typer.Option(min=2, help="How often the LM goes on.")] = 64,
    attributes: options.Attributes = Path(),
    strength: Annotated[float, typer.Option(help="Of the transform that is drawn.")] = 1.0,
    shift: Annotated[float, typer.Option(help="Of the transform that is drawn.")] = 0.0,
    probe: Annotated[
        bool, typer.Option("--probe", help="Also ask a linear probe on the LM's own state.")
    ] = False,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
) -> None:
    """Hold what the HMM expects of texts against what the LM writes, many times over."""
    from foretrace import _io
    from foretrace.attribute import LogitAffine
    from foretrace.engines.transformers import stop_tokens
    from foretrace.evaluate.fidelity import measure_fidelity
    from foretrace.evaluate.generations import encode_with_bos
    from foretrace.evaluate.plots import draw_fidelity

    lm, tokenizer = load_lm(model, dtype, device)
    known = options.load_hmm(hmm, tokenizer, lm.device)
    (target,) = options.load_goals(
        known, tokenizer, attributes, [goal], [strength], [shift], 64, False
    )
    ends = known.config.eos_token_ids
    texts = read_prompts(prompts, column)[:count]
    with Bars(resumes=False) as bars:
        found = measure_fidelity(
            lm,
            target.lookahead,
            encode_with_bos(tokenizer, texts, ends[0] if ends else None),
            ends=stop_tokens(lm.generation_config, ends),
            rollouts=rollouts,
            seed=seed,
            probe=probe,
            observe=lambda done, total: bars.show("go on", done, total, "prompts"),
        )
    summary = {"goal": goal, "prompts": len(texts), "rollouts": rollouts, **found.summary()}
    _io.write_json(out / "fidelity.json", summary)
    draw_fidelity(found, LogitAffine(strength, shift), out / "fidelity.png", goal)
    _print(summary)
    typer.echo(f"written to {out}: fidelity.json, fidelity.png")


def _print(summary: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    across = Table("tokens to come", "rank correlation", "expected", "observed", box=None)
    for ahead, facts in summary["across prefixes"].items():
        figures = (facts["spearman"], facts["expected"], facts["observed"])
        across.add_row(f"{ahead}", *(f"{each:.3f}" for each in figures))
    heads = ("within a prefix: tokens", "concordance", "of a probe", "prefixes", "pairs")
    within = Table(*heads, box=None)
    for later, facts in summary["within a prefix"].items():
        within.add_row(
            f"2 to {later + 1}",
            f"{facts['concordance']:.3f}",
            f"{facts['probe']:.3f}" if "probe" in facts else "",
            f"{facts['prefixes']}",
            f"{facts['pairs']:,}",
        )
    console = Console()
    console.print(across)
    console.print(within)
