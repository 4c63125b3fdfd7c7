"""A weight for every state, beside those of tokens: fitted by gradients through the filter."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from candidates.reference import LEAST, Dense

BATCH, RATE, FIRST = 256, 0.1, 6.0  # sigma(6) = 0.9975: states start by saying nothing
CERTAIN = -1e-5  # log-probabilities stay below, so that slopes stay finite


def fit(
    dense: Dense,
    texts: Sequence[Sequence[int]],
    costs: Tensor,
    targets: Tensor,
    epochs: int,
    observe: Callable[[int, int], None] = lambda done, total: None,
) -> Tensor:
    """Fit u by cross-entropy, costs of tokens (V,) given: (h,)."""
    logits = torch.full_like(dense.initial, FIRST, requires_grad=True)
    optimiser = torch.optim.Adam([logits], lr=RATE)
    known = torch.tensor([-sum(costs[list(text)].tolist()) for text in texts])
    order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
    batches = [order[at : at + BATCH] for at in range(0, len(order), BATCH)]
    chance = torch.Generator().manual_seed(0)
    for epoch in range(epochs):
        for done, which in enumerate(torch.randperm(len(batches), generator=chance).tolist()):
            own = batches[which]
            paths = log_paths(dense, logits.sigmoid(), [texts[place] for place in own])
            log_p = (paths + known[own]).clamp_max(CERTAIN)
            lacks = torch.log(-torch.expm1(log_p))
            loss = -(targets[own] * log_p + (1 - targets[own]) * lacks).mean()
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            observe(epoch * len(batches) + done + 1, epochs * len(batches))
    return logits.detach().sigmoid()


def log_paths(dense: Dense, states: Tensor, texts: Sequence[Sequence[int]]) -> Tensor:
    """Give log E[prod u(z_i) | text] of every text: (n,). Differentiable in u."""
    lengths = torch.tensor([len(text) for text in texts])
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts], batch_first=True)
    plain = weighted = dense.initial.expand(len(texts), -1)
    total = dense.initial.new_zeros(len(texts))
    for place in range(ids.shape[1]):
        inside = (place < lengths)[:, None]
        emission = dense.emission[:, ids[:, place]].T
        seen = plain * emission
        size = seen.sum(1, keepdim=True).clamp_min(LEAST)
        paths = weighted * (emission / size) * states
        share = paths.sum(1, keepdim=True).clamp_min(LEAST)
        total = total + torch.where(inside, share.log(), 0.0)[:, 0]
        weighted = torch.where(inside, (paths / share) @ dense.transition, weighted)
        plain = torch.where(inside, (seen / size) @ dense.transition, plain)
    return total
