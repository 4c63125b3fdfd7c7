"""`foretrace evaluate`: the field's figures of steered texts, beside other ways to write them."""

from pathlib import Path
from typing import Annotated

import typer

from foretrace.cli import goal_options as options
from foretrace.cli.model_loading import load_lm
from foretrace.cli.progress import Bars

EPILOG = (
    "Example: foretrace evaluate my-lm --hmm my-hmm --suite detox --data data --out results/detox "
    "--prompts 200"
)


def evaluate(
    model: options.Model,
    hmm: options.HMMSource,
    suite: Annotated[str, typer.Option(help="Its name, or a YAML file of your own.")],
    data: Annotated[Path, typer.Option(help="The folder that the suite's files are in.")],
    out: Annotated[Path, typer.Option(help="The folder of all that is made; resumed from.")],
    prompts: Annotated[int | None, typer.Option(min=1, help="Only the first so many.")] = None,
    continuations: Annotated[
        int | None, typer.Option(min=1, help="Of each prompt, if not as the suite says.")
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="Only this one, beside the baseline; repeatable.")
    ] = None,
    encoder: Annotated[
        str | None, typer.Option(help="Of judges that are trained: sentence-transformers.")
    ] = None,
    judges: Annotated[
        Path | None, typer.Option(help="Where those are kept, if suites are to share them.")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Continuations at once.")] = 250,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
) -> None:
    """Write by every method of a suite, judge, and compare, with 95% intervals."""
    from rich.console import Console
    from rich.markdown import Markdown

    from foretrace.evaluate.report import write_report
    from foretrace.evaluate.run import EvaluationConfig
    from foretrace.evaluate.run import evaluate as run
    from foretrace.evaluate.suite import load_suite

    plan = load_suite(suite)
    lm, tokenizer = load_lm(model, dtype, device)
    known = options.load_hmm(hmm, tokenizer, lm.device)
    config = EvaluationConfig(
        data=data,
        out=out,
        prompts=prompts,
        continuations=continuations,
        methods=tuple(method or ()),
        seed=seed,
        rows=rows,
        encoder=encoder,
        judges=judges,
    )
    with Bars() as bars:
        results = run(plan, lm, tokenizer, known, config, bars.show)
    report = write_report(results, out)
    Console().print(Markdown(report.read_text("utf-8")))
    typer.echo(f"written to {report}, and results.json beside it")
