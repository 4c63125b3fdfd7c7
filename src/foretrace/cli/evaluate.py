"""`foretrace evaluate`: compare steering with other methods on an evaluation suite."""

from pathlib import Path
from typing import Annotated

import typer

from foretrace.cli import goal_options
from foretrace.cli.model_loading import load_lm
from foretrace.cli.progress import ProgressBars

EPILOG = (
    "Example: foretrace evaluate my-lm --hmm my-hmm --suite detox --data data --out results/detox "
    "--prompts 200"
)


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
