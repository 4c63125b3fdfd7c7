"""The fit of a change of the LM's head by likelihood, on hidden states that are read once.

As in LM-Steer (Han et al. 2024), the change with the factor 1 shall make texts with the attribute
likely, and with the factor -1 texts without it. The LM is frozen.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from foretrace import _io
from peers.checkpoint import Checkpoint
from peers.parts import is_made, write_record
from peers.states import StateReader, States

Observe = Callable[[int, int], None]
MEASURED = 2_000  # held-out tokens at most


@dataclass(frozen=True)
class FitSettings:
    """The settings of a fit."""

    learning_rate: float
    weight_decay: float = 0.0
    rows: int = 512
    """Tokens of a step."""
    epochs: int = 2
    checkpoint_steps: int = 20
    seed: int = 0


class Change(nn.Module):
    """A change of the head. A subclass has its parameters as weights."""

    def logits(self, head: Callable[[Tensor], Tensor], hidden: Tensor, factor: Tensor) -> Tensor:
        """Return changed logits: (n, d) states, (n, 1) factors -> (n, V)."""
        raise NotImplementedError


def fit_change(
    make: Callable[[], Change],
    reader: StateReader,
    file: Path,
    settings: FitSettings,
    observe: Observe = lambda done, total: None,
) -> None:
    """Fit a change and write its weights; nothing if they are there.

    The file's metadata has the mean log-likelihood that held-out texts gain, in nats per token.

    Args:
        make: Makes the change before the fit.
        reader: Reads the texts.
        file: The file of the weights.
        settings: The settings.
        observe: A function that is called after each step with the steps done and all steps.
    """
    torch.manual_seed(settings.seed)
    change = make()
    inputs = reader.identity((settings, *(tuple(one.shape) for one in change.parameters())))
    if is_made(file, inputs):
        return
    states, head = reader.states, reader.lm.get_output_embeddings()
    seconds = _train(change, head, states, Run(file, inputs, settings, observe))
    gain = held_out_gain(change, head, states)
    tensors = {name: one.detach() for name, one in change.named_parameters()}
    _io.write_tensors(file, tensors, {"held-out gain": f"{gain:.4f}"})
    write_record(file, inputs, states.seconds + seconds, len(reader.texts))


@dataclass(frozen=True)
class Run:
    """Where a fit is written, and how it runs."""

    file: Path
    inputs: str
    settings: FitSettings
    observe: Observe


def _train(change: Change, head: Any, states: States, run: Run) -> float:
    """Maximise the likelihood; return the seconds, also those before an interruption."""
    settings, weights = run.settings, list(change.parameters())
    optimizer = torch.optim.AdamW(
        weights, lr=settings.learning_rate, weight_decay=settings.weight_decay
    )
    checkpoint = Checkpoint(run.file, run.inputs, weights, optimizer)
    done, seconds = checkpoint.restore()
    batches = _batches(states.trained, settings)
    for step in range(done, len(batches)):
        start = perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * (1 - step / len(batches))
        _loss(change, head, states, batches[step], 1.0).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        seconds += perf_counter() - start
        if (step + 1) % settings.checkpoint_steps == 0:
            checkpoint.save(step + 1, seconds)
        run.observe(step + 1, len(batches))
    checkpoint.remove()
    return seconds


def _batches(trained: Tensor, settings: FitSettings) -> list[Tensor]:
    """Return the indices of the tokens of every step, in a random order."""
    generator = torch.Generator().manual_seed(settings.seed)
    indices = trained.nonzero()[:, 0]
    orders = [
        indices[torch.randperm(len(indices), generator=generator)] for _ in range(settings.epochs)
    ]
    return [batch for order in orders for batch in _parts(order, settings.rows)]


def _parts(indices: Tensor, size: int) -> list[Tensor]:
    return [indices[start : start + size] for start in range(0, len(indices), size)]


def _loss(change: Change, head: Any, states: States, batch: Tensor, factor: float) -> Tensor:
    """Return the mean negative log-likelihood of tokens, each with the factor of its side.

    Both sides weigh the same, also if the texts of one are longer.
    """
    hidden, signs = states.hidden[batch].to(head.weight.dtype), states.signs[batch]
    logits = change.logits(head, hidden, factor * signs[:, None]).float()
    losses = cross_entropy(logits, states.tokens[batch], reduction="none")
    share = float((states.signs > 0).float().mean())
    weights = torch.where(signs > 0, 0.5 / share, 0.5 / (1 - share))
    return (weights * losses).mean()


@torch.no_grad()
def held_out_gain(change: Change, head: Any, states: States, factor: float = 1.0) -> float:
    """Return the mean log-likelihood that held-out tokens gain by a factor, in nats per token."""
    held_out = (~states.trained).nonzero()[:, 0]
    chosen = held_out[:: max(1, len(held_out) // MEASURED)]  # of both sides
    if not len(chosen):
        return 0.0
    total = 0.0
    for batch in _parts(chosen, 512):
        bare, changed = (_loss(change, head, states, batch, one) for one in (0.0, factor))
        total += float(bare - changed) * len(batch)
    return total / len(chosen)
