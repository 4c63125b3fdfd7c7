"""The next state as a function of the LM's hidden state: a softmax, trained on windows.

With the HMM as it is, or jointly with its tables: by turns the head, which is regressed onto the
posterior of a window's first state, and transition and emission, by EM with each window's own
start.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from candidates.reference import LEAST, Dense

BATCH = 512
KEPT = 1000.0  # tokens of every state, that its tables as distilled count for


@dataclass(frozen=True)
class Head:
    """p(next state | hidden state): a linear map, normalised inputs, softmax."""

    weight: Tensor  # (d, h)
    bias: Tensor  # (h,)
    mean: Tensor  # (d,)
    spread: Tensor  # (d,)

    @classmethod
    def blank(cls, dense: Dense, hidden: Tensor) -> "Head":
        """Begin with what the HMM believes before it has read anything: (n, d)."""
        weight = torch.zeros(hidden.shape[1], len(dense.initial))
        bias = dense.initial.clamp_min(1e-6).log()
        return cls(weight, bias, hidden.mean(0), hidden.std(0).clamp_min(1e-6))

    def __call__(self, hidden: Tensor) -> Tensor:
        """Give beliefs: (n, d) -> (n, h)."""
        return (((hidden - self.mean) / self.spread) @ self.weight + self.bias).softmax(-1)


def log_windows(dense: Dense, windows: Tensor) -> Tensor:
    """Give log p(window | its first state): (n, T) -> (n, h)."""
    ahead = dense.initial.new_ones(len(windows), len(dense.initial))
    total = ahead[:, :1].log()
    for place in reversed(range(windows.shape[1])):
        here = ahead * dense.emission[:, windows[:, place]].T
        size = here.amax(1, keepdim=True).clamp_min(LEAST)
        here, total = here / size, total + size.log()
        ahead = here if place == 0 else here @ dense.transition.T
    return ahead.clamp_min(LEAST).log() + total


def train(
    dense: Dense,
    hidden: Tensor,
    windows: Tensor,
    *,
    rounds: int = 0,
    epochs: int,
    rate: float = 2e-3,
) -> tuple[Head, Dense]:
    """Find the head under which windows after hidden states are likeliest: (n, d), (n, T).

    With `rounds`, the tables are trained with it, by turns; they keep to those that they were.
    """
    head = _regress(Head.blank(dense, hidden), dense, hidden, windows, epochs, rate)
    found = dense
    for _ in range(rounds):
        found = refine(found, head, hidden, windows, toward=dense, kept=KEPT)
        head = _regress(head, found, hidden, windows, epochs, rate)
    return head, found


def _regress(
    head: Head, dense: Dense, hidden: Tensor, windows: Tensor, epochs: int, rate: float
) -> Head:
    """Regress a head onto the posterior of first states, the HMM as it is."""
    weight, bias = head.weight.clone().requires_grad_(), head.bias.clone().requires_grad_()
    optimiser = torch.optim.Adam([weight, bias], lr=rate, weight_decay=1e-5)
    chance = torch.Generator().manual_seed(0)
    ahead = torch.cat([log_windows(dense, own) for own in torch.split(windows, BATCH)])
    for _ in range(epochs):
        for own in torch.split(torch.randperm(len(hidden), generator=chance), BATCH):
            prior = Head(weight, bias, head.mean, head.spread)(hidden[own])
            loss = -torch.logsumexp(prior.clamp_min(LEAST).log() + ahead[own], 1).mean()
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    return Head(weight.detach(), bias.detach(), head.mean, head.spread)


def refine(
    dense: Dense, head: Head, hidden: Tensor, windows: Tensor, *, toward: Dense, kept: float
) -> Dense:
    """Do a step of EM for transition and emission, where the head says how windows start.

    `toward` counts as so many tokens of every state: a Dirichlet prior.
    """
    moved = torch.zeros_like(dense.transition)
    spoken = torch.zeros_like(dense.emission.T)
    for some, own in _batches(hidden, windows):
        _count(dense, head(some), own, moved, spoken)
    transition = moved * dense.transition + kept * toward.transition
    emission = spoken.T + kept * toward.emission
    return Dense(dense.initial, _shares(transition), _shares(emission))


def _count(dense: Dense, predicted: Tensor, windows: Tensor, moved: Tensor, spoken: Tensor) -> None:
    """Add up the posteriors of states (V, h), and of pairs but for p(z' | z) (h, h)."""
    beliefs = []
    for tokens in windows.T:
        belief = _shares(predicted * dense.emission[:, tokens].T)
        beliefs.append(belief)
        predicted = belief @ dense.transition
    message = torch.ones_like(predicted)
    for place in reversed(range(windows.shape[1])):
        tokens = windows[:, place]
        spoken.index_add_(0, tokens, _shares(beliefs[place] * message))
        if place:
            evidence = message * dense.emission[:, tokens].T
            message = evidence @ dense.transition.T
            size = (beliefs[place - 1] * message).sum(1, keepdim=True).clamp_min(LEAST)
            message = message / size
            moved.addmm_(beliefs[place - 1].T, evidence / size)


def _shares(sizes: Tensor) -> Tensor:
    return sizes / sizes.sum(1, keepdim=True).clamp_min(LEAST)


def _batches(hidden: Tensor, windows: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(torch.split(hidden, BATCH), torch.split(windows, BATCH), strict=True))
