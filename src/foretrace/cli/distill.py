"""`foretrace distill` and `foretrace em`: train an HMM on texts of an LM, or on a corpus."""

import json
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretrace.chat import Prompt
from foretrace.cli.goal_options import DTYPE_HELP
from foretrace.cli.loading import (
    choose_device,
    choose_dtype,
    disable_transformers_progress,
    find_model,
    read_chats,
    read_prompts,
)
from foretrace.cli.terminal import ProgressBars
from foretrace.gguf import is_gguf

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from foretrace.distill import Corpus, DistillConfig, LMConfig, Progress
    from foretrace.distill.executor import LocalExecutor
    from foretrace.distill.ray_executor import RayExecutor
    from foretrace.hmm import HMM

EPILOG = (
    "Example: foretrace distill HuggingFaceTB/SmolLM2-135M --states 4096 --sequences 10M --out hmm"
)
EM_EPILOG = (
    "Example: foretrace em corpus --states 4096 --out my-hmm (on 8 GPUs: torchrun "
    "--nproc-per-node 8 -m foretrace em ...)"
)
SamplingOption = partial(typer.Option, rich_help_panel="Sampling from the LM")
TrainingOption = partial(typer.Option, rich_help_panel="Training the HMM")
ClusterOption = partial(typer.Option, rich_help_panel="On a cluster")


class Engine(StrEnum):
    """The engine that samples from the LM."""

    transformers = "transformers"
    vllm = "vllm"


class ProductDtype(StrEnum):
    """The dtype of matrix products; float64 also applies to all sums."""

    float64 = "float64"
    float32 = "float32"
    bfloat16 = "bfloat16"


class Start(StrEnum):
    """The initialization of EM."""

    latent = "latent"
    random = "random"


def parse_count(argument: str | int) -> int:
    """Parse a count such as 120000, 120k, 10M or 1B."""
    text = str(argument)
    factors = {"k": 10**3, "m": 10**6, "b": 10**9}
    factor = factors.get(text[-1:].lower(), 1)
    try:
        value = Decimal(text if factor == 1 else text[:-1]) * factor
    except InvalidOperation:
        value = Decimal(-1)
    if not value.is_finite() or value < 1 or value != int(value):
        raise typer.BadParameter(f"'{text}' is not a count. Write 120000, 120k, 10M or 1B.")
    return int(value)


def distill(
    model: Annotated[str, typer.Argument(help="A causal LM: a folder, a hub id, or a GGUF file.")],
    out: Annotated[
        str,
        typer.Option(help="Output folder, or s3://BUCKET/KEY; run the same command to resume."),
    ],
    states: Annotated[int, typer.Option(help="Number of hidden states.")] = 4096,
    sequences: Annotated[
        int,
        SamplingOption(
            parser=parse_count, metavar="COUNT", help="Number of sequences to sample: 120k, 10M."
        ),
    ] = 10_000_000,
    length: Annotated[int, SamplingOption(help="Tokens per sequence.")] = 32,
    prompts: Annotated[
        Path | None, SamplingOption(help="A file of prompts: .txt, .jsonl, .csv; also .xz, .gz.")
    ] = None,
    chat: Annotated[
        Path | None,
        SamplingOption(
            help="A file of chats to answer through the chat template, instead of --prompts: a "
            "user's message per line or row, or a column `messages`."
        ),
    ] = None,
    prompted: Annotated[
        float, SamplingOption(help="Share of sequences that continue a prompt.")
    ] = 0.5,
    engine: Annotated[
        Engine, SamplingOption(help="The engine that samples; for a GGUF file, it is llama.cpp.")
    ] = Engine.transformers,
    engine_options: Annotated[
        str, SamplingOption(help="JSON options for the engine: '{\"tensor_parallel_size\": 2}'.")
    ] = "{}",
    reader_options: Annotated[
        str | None,
        SamplingOption(
            help="JSON options for transformers, which computes the hidden states. Default with "
            "transformers: --engine-options."
        ),
    ] = None,
    dtype: Annotated[str, SamplingOption(help=DTYPE_HELP)] = "auto",
    end_of_text: Annotated[
        str | None,
        SamplingOption(help="Token that begins and ends texts. Default: the tokenizer's."),
    ] = None,
    start: Annotated[Start, TrainingOption(help="Initialization of EM.")] = Start.latent,
    epochs: Annotated[int, TrainingOption(help="EM passes over the corpus.")] = 10,
    batch_size: Annotated[int, TrainingOption(help="Sequences per EM step.")] = 4096,
    em_dtype: Annotated[
        ProductDtype, TrainingOption(help="Dtype of the matrix products in EM.")
    ] = ProductDtype.float32,
    held_out: Annotated[int, TrainingOption(help="Sequences held out for evaluation.")] = 4096,
    on: Annotated[
        str,
        ClusterOption(
            help="Where to run: local, ray (a cluster of this machine), or ray://HOST:PORT."
        ),
    ] = "local",
    workers: Annotated[
        int | None,
        ClusterOption(min=1, help="Workers with an LM each. Default: all that fit on the cluster."),
    ] = None,
    gpus_per_worker: Annotated[
        int | None, ClusterOption(min=0, help="GPUs of a worker. Default: 1 if there are GPUs.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    plan: Annotated[bool, typer.Option("--plan", help="Only print the estimated cost.")] = False,
    push_to_hub: Annotated[
        str | None, typer.Option(help="Publish the HMM on the hub under this id.")
    ] = None,
) -> None:
    """Distil an HMM from a language model: sample, cluster hidden states, train by EM."""
    from foretrace.distill import DistillConfig, EMConfig, LMConfig
    from foretrace.distill.em.distributed import launched_group
    from foretrace.distill.executor import LocalExecutor
    from foretrace.distill.run import distill as run
    from foretrace.distill.run import publish

    config = DistillConfig(
        num_states=states,
        sequences=sequences,
        length=length,
        prompted=prompted,
        start=start.value,
        em=EMConfig(epochs=epochs, batch_size=batch_size, dtype=em_dtype.value, held_out=held_out),
        seed=seed,
    )
    if is_gguf(model) and dtype != "auto":
        raise typer.BadParameter("--dtype must be auto for a GGUF file, which has its own dtypes.")
    executor = _executor(on, workers, gpus_per_worker, plan=plan)
    if isinstance(executor, LocalExecutor):
        device = choose_device(device)
        dtype = choose_dtype(dtype, device)
    else:  # workers choose the dtype, because their hardware may differ from this machine's
        device = "cuda" if executor.gpus else "cpu"
    lm = LMConfig(
        engine=engine.value,
        dtype=dtype,
        end_of_text=end_of_text,
        device=device,
        options=_parse_options(engine_options),
        reader_options=None if reader_options is None else _parse_options(reader_options),
    )
    if prompts is not None and chat is not None:
        raise typer.BadParameter("Pass --prompts to continue texts, or --chat to answer messages.")
    texts: list[Prompt] = [*(read_prompts(prompts) if prompts else ())]
    if chat is not None:
        texts = [*read_chats(chat)]
    disable_transformers_progress()
    find_model(model)
    if plan:
        _show_plan(model, config, lm, texts, out, workers or 1)
        return
    leads = launched_group().is_leader
    with ProgressBars(resumes=True, visible=leads) as bars:
        hmm = run(
            model,
            config,
            out=out,
            prompts=texts,
            lm=lm,
            executor=executor,
            on_progress=lambda progress: bars.update(*progress),
        )
    if leads:
        typer.echo(f"{hmm} written to {out}")
    if push_to_hub is not None and leads:
        typer.echo(f"published as {publish(out, push_to_hub)}")


def _executor(
    on: str, workers: int | None, gpus: int | None, *, plan: bool
) -> "LocalExecutor | RayExecutor":
    from foretrace.distill.executor import LocalExecutor
    from foretrace.distill.ray_executor import RayExecutor

    if on == "local" and (workers, gpus) != (None, None) and not plan:
        raise typer.BadParameter("--workers and --gpus-per-worker need a cluster: --on ray.")
    if on != "local" and not on.startswith("ray"):
        raise typer.BadParameter(f"--on takes local, ray or ray://HOST:PORT, not {on}.")
    return LocalExecutor() if on == "local" or plan else RayExecutor(on, workers, gpus)


def _parse_options(text: str) -> dict[str, Any]:
    try:
        options = json.loads(text)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise typer.BadParameter(
            "--engine-options and --reader-options take JSON: '{\"max_num_seqs\": 512}'."
        )
    return options


def _show_plan(
    model: str,
    config: "DistillConfig",
    lm: "LMConfig",
    prompts: "Sequence[Prompt]",
    out: str,
    workers: int,
) -> None:
    from rich.console import Console
    from rich.table import Table

    from foretrace.distill.config import format_bytes
    from foretrace.distill.plan import plan

    estimate = plan(model, config, prompts=prompts, lm=lm, folder=out, workers=workers)
    table = Table("stage", "time", "work", title=f"{config.num_states:,} states of {model}")
    for stage in estimate.stages:
        table.add_row(stage.name, _duration(stage.seconds), stage.work)
    where = (
        "one process, this machine" if workers == 1 else f"{workers:,} workers like this machine"
    )
    table.add_row("total", _duration(estimate.seconds), where)
    console = Console()
    console.print(table)
    if workers > 1:
        hours = workers * estimate.seconds / 3600
        console.print(f"{hours:,.1f} hours of all workers, without the network's share of EM")
    costs = estimate.costs
    console.print(
        f"disk: {format_bytes(costs.disk)} at most (corpus {format_bytes(costs.corpus)}, hidden "
        f"states {format_bytes(costs.hidden)} temporarily, HMM {format_bytes(costs.table)})\n"
        f"memory: the LM and its engine while sampling; then "
        f"{format_bytes(costs.latent_memory)} for "
        f"the initialization; then {format_bytes(costs.em_memory)} for EM"
    )


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.1f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:,.0f} days"


def em(
    corpus: Annotated[str, typer.Argument(help="The corpus: a folder or a URL.")],
    out: Annotated[str, typer.Option(help="Output folder or URL: HMM, metrics, checkpoint.")],
    states: Annotated[
        int | None, typer.Option(help="Number of hidden states of a random initialization.")
    ] = None,
    start: Annotated[
        str | None, typer.Option(help="An HMM to start from instead of a random one.")
    ] = None,
    epochs: Annotated[int, typer.Option(help="Passes over the corpus.")] = 50,
    batch_size: Annotated[int, typer.Option(help="Sequences per step.")] = 4096,
    first_step: Annotated[
        float, typer.Option(help="First step size; below 1 adapts --start instead of replacing it.")
    ] = 1.0,
    pseudocount: Annotated[float, typer.Option(help="Added to every expected count.")] = 1e-3,
    dtype: Annotated[
        ProductDtype, typer.Option(help="Dtype of the matrix products.")
    ] = ProductDtype.float32,
    held_out: Annotated[int, typer.Option(help="Sequences held out for evaluation.")] = 4096,
    evaluations: Annotated[
        int, typer.Option(help="Number of evaluations on the held-out sequences.")
    ] = 20,
    checkpoint_minutes: Annotated[float, typer.Option(help="Minutes between checkpoints.")] = 10.0,
    seed: Annotated[int, typer.Option(help="Random seed of the initialization and the order.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    tensorboard: Annotated[bool, typer.Option(help="Also write TensorBoard events.")] = False,
) -> None:
    """Train an HMM on a corpus by mini-batch EM. Run the same command again to resume."""
    from foretrace.distill import Corpus, EMConfig, train
    from foretrace.distill.em.distributed import process_group

    config = EMConfig(
        epochs=epochs,
        batch_size=batch_size,
        first_step=first_step,
        pseudocount=pseudocount,
        dtype=dtype.value,
        held_out=held_out,
        evaluations=evaluations,
        checkpoint_minutes=checkpoint_minutes,
        seed=seed,
    )
    chosen_device = choose_device(device)
    with process_group(chosen_device) as group:
        opened = Corpus(corpus)
        with ProgressBars(resumes=True, visible=group.is_leader) as bars:
            reporter = _Reporter(bars, Path(out) if tensorboard and group.is_leader else None)
            trained = train(
                _initial_hmm(opened, states, start, seed).to(
                    chosen_device, config.accumulator_dtype
                ),
                opened,
                config,
                folder=out,
                on_progress=reporter.report,
            )
        if group.is_leader:
            reporter.close()
            trained.save_pretrained(out)
            typer.echo(f"written to {out}")


def _initial_hmm(corpus: "Corpus", states: int | None, start: str | None, seed: int) -> "HMM":
    from foretrace.errors import InvalidInputError
    from foretrace.hmm import HMM

    if start is not None and states is None:
        return HMM.from_pretrained(start)
    if states is not None and start is None:
        vocab, ends = corpus.manifest.vocab_size, corpus.manifest.eos_token_ids
        return HMM.random(states, vocab, eos_token_id=ends, seed=seed)
    raise InvalidInputError(
        "Pass either --states for a random initialization, or --start for an HMM."
    )


class _Reporter:
    """Shows progress on the terminal, and writes TensorBoard events if enabled."""

    def __init__(self, bars: ProgressBars, tensorboard: Path | None) -> None:
        self.bars = bars
        self.evaluation = ""
        self.writer = None if tensorboard is None else _open_tensorboard(tensorboard)

    def report(self, progress: "Progress") -> None:
        """Show the metrics of one step."""
        if progress.held_out is not None:
            self.evaluation = f"held-out {progress.held_out:.4f}"
        if progress.baselines is not None:
            baselines = progress.baselines
            self.evaluation += f" (unigram {baselines.unigram:.4f}, bigram {baselines.bigram:.4f})"
        speed = progress.tokens / max(progress.seconds, 1e-9)
        note = f"{progress.log_likelihood:.4f} nats/token  {speed:,.0f} tokens/s  {self.evaluation}"
        self.bars.update("EM", progress.step, progress.steps, "steps", note.strip())
        if self.writer is not None:
            for name in ("log_likelihood", "held_out", "step_size"):
                value = getattr(progress, name)
                if value is not None:
                    self.writer.add_scalar(name, value, progress.step)

    def close(self) -> None:
        """Close the TensorBoard file, and print the last evaluation."""
        if self.writer is not None:
            self.writer.close()
        if self.evaluation:
            typer.echo(f"{self.evaluation} nats/token")


def _open_tensorboard(folder: Path) -> "SummaryWriter":
    from foretrace.errors import InvalidInputError

    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise InvalidInputError("TensorBoard is not installed: pip install tensorboard.") from None
    return SummaryWriter(str(folder / "tensorboard"))
