"""The next state as a function of the LM's hidden state: a softmax, trained on windows."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from candidates.reference import LEAST, Dense

BATCH = 512


@dataclass(frozen=True)
class Head:
    """p(next state | hidden state): a linear map, normalised inputs, softmax."""

    weight: Tensor  # (d, h)
    bias: Tensor  # (h,)
    mean: Tensor  # (d,)
    spread: Tensor  # (d,)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Give beliefs: (n, d) -> (n, h)."""
        return (((hidden - self.mean) / self.spread) @ self.weight + self.bias).softmax(-1)


def log_windows(dense: Dense, windows: Tensor) -> Tensor:
    """Give log p(window | its first state), up to a constant of the window: (n, T) -> (n, h)."""
    ahead = dense.initial.new_ones(len(windows), len(dense.initial))
    for place in reversed(range(windows.shape[1])):
        here = ahead * dense.emission[:, windows[:, place]].T
        here = here / here.amax(1, keepdim=True).clamp_min(LEAST)
        ahead = here if place == 0 else here @ dense.transition.T
    return ahead.clamp_min(LEAST).log()


def train(
    dense: Dense,
    hidden: Tensor,
    windows: Tensor,
    epochs: int,
    rate: float = 2e-3,
    observe: Callable[[int, int], None] = lambda done, total: None,
) -> Head:
    """Find the head under which windows after hidden states are likeliest: (n, d), (n, T)."""
    mean, spread = hidden.mean(0), hidden.std(0).clamp_min(1e-6)
    weight = torch.zeros(hidden.shape[1], len(dense.initial), requires_grad=True)
    bias = dense.initial.clamp_min(1e-6).log().clone().requires_grad_()
    optimiser = torch.optim.Adam([weight, bias], lr=rate, weight_decay=1e-5)
    chance = torch.Generator().manual_seed(0)
    steps = epochs * -(-len(hidden) // BATCH)
    for epoch in range(epochs):
        for done, own in enumerate(
            torch.split(torch.randperm(len(hidden), generator=chance), BATCH)
        ):
            head = Head(weight, bias, mean, spread)
            prior = head(hidden[own]).clamp_min(LEAST).log()
            loss = -torch.logsumexp(prior + log_windows(dense, windows[own]), 1).mean()
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            observe(epoch * (steps // epochs) + done + 1, steps)
    return Head(weight.detach(), bias.detach(), mean, spread)
