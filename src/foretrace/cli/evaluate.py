"""`foretrace evaluate`, `fidelity` and `judge train`: measure steered texts and HMMs."""

from pathlib import Path
from typing import Annotated, Any

import typer

from foretrace.cli import goal_options
from foretrace.cli.loading import load_lm, read_prompts
from foretrace.cli.terminal import ProgressBars

EPILOG = (
    "Example: foretrace evaluate my-lm --hmm my-hmm --suite detox --data data --out results/detox "
    "--prompts 200"
)
FIDELITY_EPILOG = (
    "Example: foretrace fidelity my-lm --hmm my-hmm --goal nontoxic --prompts prompts.jsonl "
    "--out fidelity"
)
judge = typer.Typer(help="Train judges.", no_args_is_help=True)


def evaluate(
    model: goal_options.Model,
    hmm: goal_options.HMMSource,
    suite: Annotated[str, typer.Option(help="The name of a suite, or a YAML file.")],
    data: Annotated[Path, typer.Option(help="The folder of the suite's data files.")],
    out: Annotated[Path, typer.Option(help="Output folder; run the same command again to resume.")],
    prompts: Annotated[
        int | None, typer.Option(min=1, help="Use only the first N prompts.")
    ] = None,
    continuations: Annotated[
        int | None, typer.Option(min=1, help="Continuations per prompt. Default: set by the suite.")
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="Run only this method and the baseline; repeatable.")
    ] = None,
    rival_hmm: Annotated[
        str | None,
        typer.Option(help="Another HMM: methods also run with it, at the same price."),
    ] = None,
    encoder: Annotated[
        str | None, typer.Option(help="The sentence-transformers encoder of trained judges.")
    ] = None,
    judges: Annotated[
        Path | None, typer.Option(help="Folder of trained judges, to share them between suites.")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Continuations per batch.")] = 250,
    seed: goal_options.Seed = 0,
    device: goal_options.Device = "auto",
    dtype: goal_options.Dtype = "auto",
) -> None:
    """Generate texts by every method of a suite, score them, and report 95% intervals."""
    from rich.console import Console
    from rich.markdown import Markdown

    from foretrace.evaluate.report import write_report
    from foretrace.evaluate.run import EvaluationConfig
    from foretrace.evaluate.run import evaluate as run
    from foretrace.evaluate.suite import add_rival_hmm, load_suite, rival_name

    loaded_suite, methods = load_suite(suite), list(method or ())
    if rival_hmm is not None:
        loaded_suite = add_rival_hmm(loaded_suite, rival_hmm)
        rivals = [rival_name(name, rival_hmm) for name in methods]
        methods += [name for name in rivals if name in loaded_suite.methods]
    lm, tokenizer = load_lm(model, dtype, device)
    loaded_hmm = goal_options.load_hmm(hmm, tokenizer, lm.device)
    config = EvaluationConfig(
        data=data,
        out=out,
        prompts=prompts,
        continuations=continuations,
        methods=tuple(methods),
        seed=seed,
        rows=rows,
        encoder=encoder,
        judges=judges,
    )
    with ProgressBars(resumes=True) as bars:
        results = run(loaded_suite, lm, tokenizer, loaded_hmm, config, bars.update)
    report = write_report(results, out)
    Console().print(Markdown(report.read_text("utf-8")))
    typer.echo(f"written to {report}, and results.json beside it")


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
    from foretrace.evaluate.continuations import encode_with_bos
    from foretrace.evaluate.fidelity import measure_fidelity
    from foretrace.evaluate.plots import draw_fidelity
    from foretrace.lookahead import Lookahead

    plotted = goal_options.parse_transform(transform)
    settings = goal_options.GoalSettings([1.0])
    goal_options.check_goals(attributes, [goal])
    lm, tokenizer = load_lm(model, dtype, device)
    loaded_hmm = goal_options.load_hmm(hmm, tokenizer, lm.device)
    build_probe = goal_options.probe_builder(lm, tokenizer)
    loaded = goal_options.load_goals(
        loaded_hmm, tokenizer, attributes, [goal], settings, 64, build_probe=build_probe
    )
    lookahead = loaded.goal.factors[0].lookahead
    assert isinstance(lookahead, Lookahead)
    eos_token_ids = loaded_hmm.config.eos_token_ids
    texts = read_prompts(prompts, column)[:count]
    with ProgressBars(resumes=False) as bars:
        result = measure_fidelity(
            lm,
            lookahead,
            encode_with_bos(tokenizer, texts, eos_token_ids[0] if eos_token_ids else None),
            ends=stop_tokens(lm.generation_config, eos_token_ids),
            rollouts=rollouts,
            seed=seed,
            probe=probe,
            on_progress=lambda done, total: bars.update("rollouts", done, total, "prompts"),
        )
    summary = {"goal": goal, "prompts": len(texts), "rollouts": rollouts, **result.summary()}
    _io.write_json(out / "fidelity.json", summary)
    draw_fidelity(result, plotted, out / "fidelity.png", goal)
    _print_fidelity(summary)
    typer.echo(f"written to {out}: fidelity.json, fidelity.png")


def _print_fidelity(summary: dict[str, Any]) -> None:
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


@judge.callback()
def judge_options() -> None:
    """Train judges."""


@judge.command(
    "train", epilog="Example: foretrace judge train labelled.jsonl --label toxic --out toxic-judge"
)
def train_judge(
    data: Annotated[Path, typer.Argument(help="Texts: .jsonl, .csv, .parquet; also .xz, .gz.")],
    out: Annotated[Path, typer.Option(help="Output folder.")],
    text: Annotated[str, typer.Option(help="The column of texts.")] = "text",
    label: Annotated[str, typer.Option(help="The column of labels.")] = "label",
    encoder: Annotated[
        str | None, typer.Option(help="Also use embeddings of this sentence-transformers model.")
    ] = None,
    encoder_dtype: Annotated[str, typer.Option(help="Dtype of the encoder.")] = "float32",
) -> None:
    """Train a linear judge on nine tenths of labelled texts, and evaluate it on the rest."""
    from foretrace.evaluate import scoring
    from foretrace.evaluate.suite import Table

    table = Table(str(data.resolve()), text)
    rows = table.rows(Path())
    held_out, rest = rows[::10], [row for index, row in enumerate(rows) if index % 10]
    trained = scoring.train_judge(rest, table, label, encoder, encoder_dtype)
    trained.save(out)
    accuracy = scoring.held_out_accuracy(trained, held_out, table, label)
    typer.echo(
        f"trained on {len(rest):,} texts; accuracy {accuracy:.1%} on {len(held_out):,} others "
        f"({len(trained.config.classes)} classes); written to {out}"
    )
