"""The fit of context rewards: what the choice of a token in its context says about the text."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits as log_loss
from torch.nn.functional import dropout

from foretrace.attribute.context import ContextReward
from foretrace.errors import InvalidInputError

RANK = 16
DROPOUT = 0.3  # of hidden states and of token features
RIDGE = 0.01  # on the rewards
STATE_RIDGE = 1e-4  # on what the context alone says
EPOCHS = 3
BATCH, MIN_BATCHES = 2_048, 16  # tokens of a step at most, and steps of an epoch at least
RATE = 2e-3  # the largest of the one-cycle schedule
START = 0.15  # the standard deviation of what a component reads and writes at first
OnSteps = Callable[[int, int], None]
"""Called with the number of steps that are done, and of all steps."""


@dataclass(frozen=True)
class TokenStates:
    """The tokens of scored texts, each with the hidden state from which the LM predicts it.

    Attributes:
        shards: The states in the order of the tokens, each (n, d). They may be memory-mapped.
        tokens: The token ids, (N,).
        texts: The index of each token's text, (N,).
        scores: The probability that each text has the attribute, (n,).
        held_out: Whether each text is held out, (n,).

    Raises:
        InvalidInputError: If the shapes do not match, or all texts are on one side of the split.
    """

    shards: Sequence[Tensor]
    tokens: Tensor
    texts: Tensor
    scores: Tensor
    held_out: Tensor

    def __post_init__(self) -> None:
        count = sum(map(len, self.shards))
        if not (len(self.tokens) == len(self.texts) == count):
            raise InvalidInputError(
                f"There are {count} states, {len(self.tokens)} tokens and {len(self.texts)} "
                f"indices of texts. Pass one of each for every token."
            )
        sizes = [len(self.rows(held_out)) for held_out in (False, True)]
        if not all(sizes):
            raise InvalidInputError(
                f"{sizes[0]} tokens are to fit to and {sizes[1]} are held out. Pass more texts."
            )

    @cached_property
    def _ends(self) -> Tensor:
        return torch.tensor([len(shard) for shard in self.shards]).cumsum(0)

    def rows(self, held_out: bool) -> Tensor:
        """Return the indices of the tokens that are held out, or are not."""
        return (self.held_out[self.texts] == held_out).nonzero()[:, 0]

    def read(self, rows: Tensor) -> Tensor:
        """Read the states of tokens, in float32: (n,) -> (n, d)."""
        states = torch.empty(len(rows), self.shards[0].shape[1])
        shard_of = torch.searchsorted(self._ends, rows, right=True)
        for number in torch.unique(shard_of).tolist():
            here, shard = shard_of == number, self.shards[number]
            states[here] = shard[rows[here] - (int(self._ends[number]) - len(shard))].float()
        return states


class ContextFit(NamedTuple):
    """A fitted context reward.

    Attributes:
        reward: The reward.
        record: The settings, and the log-loss on held-out tokens without the reward and with it.
    """

    reward: ContextReward
    record: dict[str, Any]

    @property
    def improves(self) -> bool:
        """Whether the reward improves the log-loss on held-out tokens."""
        return bool(self.record["loss"] < self.record["loss_without"])


def fit_context(
    data: TokenStates,
    features: Tensor,
    basis: Tensor,
    fingerprint: str,
    *,
    seed: int = 0,
    on_progress: OnSteps = lambda done, total: None,
) -> ContextFit:
    """Fit a context reward by logistic regression on every token.

    The score of the text is predicted from f(h) + r(h, x), for a token x and the hidden state h
    before it. f is linear, and is not kept: it takes what the context alone says, so that r, the
    reward, is what the choice of the token changes. r is bilinear in h and the features of x.

    Args:
        data: The tokens and their states. They are read in batches.
        features: `Probe.features` of the LM, (V, k).
        basis: `Probe.basis`, (d, k).
        fingerprint: `Head.fingerprint` of the LM.
        seed: The random seed.
        on_progress: Called after every step.

    Returns:
        The reward, and what it improves.
    """
    batches = _Batches(data, features)
    width, count = basis.shape
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _Model(width, count)
        _train(model, batches, on_progress)
    without, loss = _held_out_loss(model, batches)
    record = {
        "rank": RANK,
        "features": count,
        "tokens": len(batches.fitted),
        "held_out_tokens": len(batches.held_out),
        "loss_without": without,
        "loss": loss,
    }
    return ContextFit(model.reward(batches, basis, fingerprint), record)


class _Batches:
    """Batches of standardised states, token features and scores."""

    def __init__(self, data: TokenStates, features: Tensor) -> None:
        self.data, self.features = data, features
        self.fitted, self.held_out = data.rows(held_out=False), data.rows(held_out=True)
        self.size = max(1, min(BATCH, len(self.fitted) // MIN_BATCHES))
        total = square = torch.zeros(())
        for rows in torch.split(self.fitted, BATCH):
            states = data.read(rows).double()
            total, square = total + states.sum(0), square + states.square().sum(0)
        mean = total / len(self.fitted)
        variance = square / len(self.fitted) - mean.square()
        self.mean, self.deviation = mean.float(), variance.clamp_min(1e-12).sqrt().float()

    def read(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return states (n, d), features (n, k) and scores (n,)."""
        states = (self.data.read(rows) - self.mean) / self.deviation
        features = self.features[self.data.tokens[rows].long()].float()
        return states, features, self.data.scores[self.data.texts[rows]].float()

    def __len__(self) -> int:
        return len(self.fitted) // self.size

    def epochs(self) -> Iterator[Tensor]:
        """Yield the rows of batches, in another order in every epoch."""
        for _ in range(EPOCHS):
            order = self.fitted[torch.randperm(len(self.fitted))]
            yield from (rows for rows in torch.split(order, self.size) if len(rows) == self.size)


class _Model(torch.nn.Module):
    """Logits of a text's score at each of its tokens, without the reward and with it."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.without = _zero_linear(width)
        self.beside = _zero_linear(width)  # the reward
        self.readers = torch.nn.Parameter(START * width**-0.5 * torch.randn(RANK, width))
        self.offsets = torch.nn.Parameter(torch.zeros(RANK))
        self.writers = torch.nn.Parameter(START * count**-0.5 * torch.randn(RANK, count))
        self.direct = torch.nn.Parameter(torch.zeros(count))  # whatever the context

    def forward(self, states: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return both logits, (n,) each."""
        read = states @ self.readers.T + self.offsets
        reward = (read * (features @ self.writers.T)).sum(1) + features @ self.direct
        return self.without(states)[:, 0], self.beside(states)[:, 0] + reward

    def penalty(self) -> Tensor:
        """Return the squared penalty."""
        low_rank = self.readers.square().sum() + self.writers.square().sum()
        alone = self.without.weight.square().sum() + self.beside.weight.square().sum()
        rewards: Tensor = low_rank / RANK + self.direct.square().sum()
        return 0.5 * RIDGE * rewards + STATE_RIDGE * alone

    @torch.no_grad()
    def reward(self, batches: _Batches, basis: Tensor, fingerprint: str) -> ContextReward:
        """Return the reward of states that are not standardised, and of rows of the head."""
        readers = self.readers / batches.deviation
        offsets = self.offsets - readers @ batches.mean
        constant = torch.zeros(1, readers.shape[1] + 1)
        constant[0, -1] = 1.0
        readers = torch.cat([torch.cat([readers, offsets[:, None]], 1), constant])
        # The directions of the basis are orthogonal.
        back = (basis / basis.square().sum(0)).T
        writers = torch.cat([self.writers, self.direct[None]]) @ back
        return ContextReward(readers, writers, fingerprint)


def _zero_linear(width: int) -> torch.nn.Linear:
    """Return a function that is zero: steps are few, and would not undo a random one."""
    layer = torch.nn.Linear(width, 1)
    for parameter in layer.parameters():
        torch.nn.init.zeros_(parameter)
    return layer


def _train(model: _Model, batches: _Batches, on_progress: OnSteps) -> None:
    """Minimise the log-loss by Adam, with a one-cycle schedule."""
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    total = EPOCHS * len(batches)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=total + 1)
    for done, rows in enumerate(batches.epochs(), 1):
        states, features, scores = batches.read(rows)
        logits = model(dropout(states, DROPOUT), dropout(features, DROPOUT))
        loss = sum((log_loss(one, scores) for one in logits), start=model.penalty())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        on_progress(done, total)


@torch.inference_mode()
def _held_out_loss(model: _Model, batches: _Batches) -> tuple[float, float]:
    """Return the mean log-loss on held-out tokens, without the reward and with it."""
    sums = torch.zeros(2, dtype=torch.float64)
    for rows in torch.split(batches.held_out, BATCH):
        states, features, scores = batches.read(rows)
        losses = [log_loss(one, scores, reduction="sum") for one in model(states, features)]
        sums += torch.stack(losses).double()
    without, loss = (sums / len(batches.held_out)).tolist()
    return without, loss
