"""`foretrace em`: train an HMM on a corpus of token sequences."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretrace.cli.device import choose_device
from foretrace.cli.progress import Bars

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from foretrace.distill import Corpus, Progress
    from foretrace.hmm import HMM


class ProductDtype(StrEnum):
    """What products can run in; float64 means everything, to the last bit."""

    float64 = "float64"
    float32 = "float32"
    bfloat16 = "bfloat16"


EPILOG = (
    "Example: foretrace em corpus --states 4096 --out my-hmm (on 8 GPUs: torchrun "
    "--nproc-per-node 8 -m foretrace em ...)"
)


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
    from foretrace.distill import Corpus, EMConfig, train
    from foretrace.distill.em.distributed import process_group

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
    place = choose_device(device)
    with process_group(place) as group:
        opened = Corpus(corpus)
        with Bars(visible=group.is_leader) as bars:
            screen = _Screen(bars, out if tensorboard and group.is_leader else None)
            trained = train(
                _start(opened, states, start, seed).to(place, config.accumulator_dtype),
                opened,
                config,
                folder=out,
                observe=screen.show,
            )
        if group.is_leader:
            screen.close()
            trained.save_pretrained(out)
            typer.echo(f"written to {out}")


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

    def __init__(self, bars: Bars, tensorboard: Path | None) -> None:
        self.bars = bars
        self.measured = ""
        self.writer = None if tensorboard is None else _tensorboard(tensorboard)

    def show(self, progress: "Progress") -> None:
        """Show one step."""
        if progress.held_out is not None:
            self.measured = f"held-out {progress.held_out:.4f}"
        if progress.baselines is not None:
            found = progress.baselines
            self.measured += f" (unigram {found.unigram:.4f}, bigram {found.bigram:.4f})"
        speed = progress.tokens / max(progress.seconds, 1e-9)
        note = f"{progress.log_likelihood:.4f} nats/token  {speed:,.0f} tokens/s  {self.measured}"
        self.bars.show("EM", progress.step, progress.steps, "steps", note.strip())
        if self.writer is not None:
            for name in ("log_likelihood", "held_out", "step_size"):
                value = getattr(progress, name)
                if value is not None:
                    self.writer.add_scalar(name, value, progress.step)

    def close(self) -> None:
        """Say what it came to."""
        if self.writer is not None:
            self.writer.close()
        if self.measured:
            typer.echo(f"{self.measured} nats/token")


def _tensorboard(folder: Path) -> "SummaryWriter":
    from foretrace.errors import InvalidInputError

    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise InvalidInputError("TensorBoard is not installed: pip install tensorboard.") from None
    return SummaryWriter(str(folder / "tensorboard"))
