"""`foretrace em`: train an HMM on a corpus of token sequences."""

import os
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Self

import typer

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from foretrace.distill import Corpus, Progress
    from foretrace.hmm import HMM


class ProductDtype(StrEnum):
    """What products can run in; float64 means everything, to the last bit."""

    float64 = "float64"
    float32 = "float32"
    bfloat16 = "bfloat16"


EPILOG = "Example: torchrun --nproc-per-node 8 -m foretrace em corpus --states 4096 --out my-hmm"


def em(
    corpus: Annotated[Path, typer.Argument(help="The folder of the corpus.")],
    out: Annotated[Path, typer.Option(help="The folder to write: HMM, metrics, checkpoint.")],
    states: Annotated[int | None, typer.Option(help="Hidden states, for a random start.")] = None,
    start: Annotated[str | None, typer.Option(help="An HMM to start from instead.")] = None,
    epochs: Annotated[int, typer.Option(help="Passes over the corpus.")] = 50,
    batch_size: Annotated[int, typer.Option(help="Sequences in a step.")] = 4096,
    pseudocount: Annotated[float, typer.Option(help="Added to every expected count.")] = 1e-3,
    dtype: Annotated[
        ProductDtype, typer.Option(help="What products run in.")
    ] = ProductDtype.float32,
    held_out: Annotated[int, typer.Option(help="Sequences kept aside to measure on.")] = 4096,
    evaluations: Annotated[int, typer.Option(help="How often to measure.")] = 20,
    checkpoint_minutes: Annotated[float, typer.Option(help="Minutes between checkpoints.")] = 10.0,
    seed: Annotated[int, typer.Option(help="Decides the random start and the order.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    tensorboard: Annotated[bool, typer.Option(help="Also write TensorBoard events.")] = False,
) -> None:
    """Train an HMM on a corpus by mini-batch EM; run it again to go on where it stopped."""
    import torch

    from foretrace.distill import Corpus, EMConfig, train
    from foretrace.distill.group import joined

    config = EMConfig(
        epochs=epochs,
        batch_size=batch_size,
        pseudocount=pseudocount,
        dtype=dtype.value,
        held_out=held_out,
        evaluations=evaluations,
        checkpoint_minutes=checkpoint_minutes,
        seed=seed,
    )
    place = _place(device)
    with joined(place) as group:
        opened = Corpus(corpus)
        exact = torch.float64 if dtype is ProductDtype.float64 else torch.float32
        with _Screen(out if tensorboard else None, visible=group.leads) as screen:
            trained = train(
                _start(opened, states, start, seed).to(place, exact),
                opened,
                config,
                folder=out,
                observe=screen.show,
            )
        if group.leads:
            trained.save_pretrained(out)
            typer.echo(f"written to {out}")


def _place(device: str) -> str:
    """Choose the device: under torchrun, each process its own GPU."""
    import torch

    from foretrace.errors import InvalidInputError

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda:") and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InvalidInputError(
            f"Several processes cannot share {device}: give --device cuda, and each takes its own."
        )
    if device != "cuda":
        return device
    place = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    torch.cuda.set_device(place)
    return place


def _start(corpus: "Corpus", states: int | None, start: str | None, seed: int) -> "HMM":
    from foretrace.errors import InvalidInputError
    from foretrace.hmm import HMM

    if start is not None and states is None:
        return HMM.from_pretrained(start)
    if states is not None and start is None:
        vocab, eos = corpus.manifest.vocab_size, corpus.manifest.eos_token_id
        return HMM.random(states, vocab, eos_token_id=eos, seed=seed)
    raise InvalidInputError("Give either --states, for a random start, or --start, an HMM.")


class _Screen:
    """The bar on the terminal, and TensorBoard if asked for."""

    def __init__(self, tensorboard: Path | None, *, visible: bool) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self.visible = visible
        self.bar = Bar(
            TextColumn("EM"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            disable=not visible,
        )
        self.task = self.bar.add_task("EM", total=None, figures="")
        self.measured = ""
        self.writer = _tensorboard(tensorboard) if tensorboard is not None and visible else None

    def show(self, progress: "Progress") -> None:
        """Show one step."""
        if not self.visible:
            return
        if progress.held_out is not None:
            self.measured = f"held-out {progress.held_out:.4f}"
        if progress.baselines is not None:
            found = progress.baselines
            self.measured += f" (unigram {found.unigram:.4f}, bigram {found.bigram:.4f})"
        speed = progress.tokens / max(progress.seconds, 1e-9)
        figures = (
            f"{progress.log_likelihood:.4f} nats/token  {speed:,.0f} tokens/s  {self.measured}"
        )
        self.bar.update(
            self.task, completed=progress.step, total=progress.steps, figures=figures.strip()
        )
        if self.writer is not None:
            for name in ("log_likelihood", "held_out", "step_size"):
                value = getattr(progress, name)
                if value is not None:
                    self.writer.add_scalar(name, value, progress.step)

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.bar.stop()
        if self.writer is not None:
            self.writer.close()
        if self.visible and kind is None and self.measured:
            typer.echo(f"{self.measured} nats/token")


def _tensorboard(folder: Path) -> "SummaryWriter":
    from foretrace.errors import InvalidInputError

    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise InvalidInputError("TensorBoard is not installed: pip install tensorboard.") from None
    return SummaryWriter(str(folder / "tensorboard"))
