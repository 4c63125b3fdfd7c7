"""`foretrace em`: train an HMM on a corpus of token sequences."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretrace.cli.device import choose_device
from foretrace.cli.progress import ProgressBars

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from foretrace.distill import Corpus, Progress
    from foretrace.hmm import HMM


class ProductDtype(StrEnum):
    """The dtype of matrix products; float64 also applies to all sums."""

    float64 = "float64"
    float32 = "float32"
    bfloat16 = "bfloat16"


EPILOG = (
    "Example: foretrace em corpus --states 4096 --out my-hmm (on 8 GPUs: torchrun "
    "--nproc-per-node 8 -m foretrace em ...)"
)


def em(
    corpus: Annotated[Path, typer.Argument(help="The corpus folder.")],
    out: Annotated[Path, typer.Option(help="Output folder: HMM, metrics, checkpoint.")],
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
            reporter = _Reporter(bars, out if tensorboard and group.is_leader else None)
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
