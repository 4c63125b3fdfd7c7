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

RANK = 8
DROPOUT = 0.3  # of hidden states and of token features
RIDGE = 0.03  # on the context reward
STATE_RIDGE = 1e-4  # on what the context alone and the word alone say
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
        record: The settings, the log-loss on held-out tokens without the reward and with it, and
            the standard error of their difference over texts.
    """

    reward: ContextReward
    record: dict[str, Any]

    @property
    def improves(self) -> bool:
        """Whether the log-loss on held-out tokens improves by more than two standard errors."""
        gain = self.record["loss_without"] - self.record["loss"]
        return bool(gain > 2 * self.record["standard_error"])


def fit_context(
    data: TokenStates,
    rewards: Tensor,
    features: Tensor,
    basis: Tensor,
    fingerprint: str,
    *,
    seed: int = 0,
    on_progress: OnSteps = lambda done, total: None,
) -> ContextFit:
    """Fit a context reward by logistic regression on every token.

    The score of the text is predicted from f(h, v) + r(h, x), for a token x with the reward v of
    its word, and the hidden state h before it. f is linear, and is not kept: it takes what the
    context alone and the word alone say, so that r, the context reward, is what the choice of the
    token changes in its context. r is bilinear in h and the features of x, and 0 for a mean h.

    Args:
        data: The tokens and their states. They are read in batches.
        rewards: The reward of each word, (V,).
        features: `Probe.features` of the LM, (V, k).
        basis: `Probe.basis`, (d, k).
        fingerprint: `Head.fingerprint` of the LM.
        seed: The random seed.
        on_progress: Called after every step.

    Returns:
        The reward, and what it improves.
    """
    batches = _Batches(data, rewards, features)
    width, count = basis.shape
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _Model(width, count)
        _train(model, batches, on_progress)
    record = {
        "rank": RANK,
        "features": count,
        "tokens": len(batches.fitted),
        "held_out_tokens": len(batches.held_out),
        **_held_out_loss(model, batches),
    }
    return ContextFit(model.reward(batches, basis, fingerprint), record)


class _Batch(NamedTuple):
    states: Tensor  # (n, d)
    rewards: Tensor  # (n,)
    features: Tensor  # (n, k)
    scores: Tensor  # (n,)

    def with_dropout(self) -> "_Batch":
        """Drop some states and features."""
        states, features = (dropout(one, DROPOUT) for one in (self.states, self.features))
        return self._replace(states=states, features=features)


class _Batches:
    """Batches of standardised states and rewards of words, of token features and of scores."""

    def __init__(self, data: TokenStates, rewards: Tensor, features: Tensor) -> None:
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
        scale = rewards[data.tokens[self.fitted].long()].square().mean().sqrt().clamp_min(1e-6)
        self.rewards = (rewards / scale).float()

    def read(self, rows: Tensor) -> "_Batch":
        """Read a batch."""
        tokens = self.data.tokens[rows].long()
        return _Batch(
            (self.data.read(rows) - self.mean) / self.deviation,
            self.rewards[tokens],
            self.features[tokens].float(),
            self.data.scores[self.data.texts[rows]].float(),
        )

    def __len__(self) -> int:
        return len(self.fitted) // self.size

    def epochs(self) -> Iterator[Tensor]:
        """Yield the rows of batches, in another order in every epoch."""
        for _ in range(EPOCHS):
            order = self.fitted[torch.randperm(len(self.fitted))]
            yield from (rows for rows in torch.split(order, self.size) if len(rows) == self.size)


class _Model(torch.nn.Module):
    """Logits of a text's score at each of its tokens, without the context reward and with it."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.without = _zero_linear(width + 1)
        self.beside = _zero_linear(width + 1)  # the context reward
        self.readers = torch.nn.Parameter(START * width**-0.5 * torch.randn(RANK, width))
        self.writers = torch.nn.Parameter(START * count**-0.5 * torch.randn(RANK, count))

    def forward(self, batch: _Batch) -> tuple[Tensor, Tensor]:
        """Return both logits, (n,) each."""
        known = torch.cat([batch.states, batch.rewards[:, None]], 1)
        reward = ((batch.states @ self.readers.T) * (batch.features @ self.writers.T)).sum(1)
        return self.without(known)[:, 0], self.beside(known)[:, 0] + reward

    def penalty(self) -> Tensor:
        """Return the squared penalty."""
        reward: Tensor = self.readers.square().sum() + self.writers.square().sum()
        alone = self.without.weight.square().sum() + self.beside.weight.square().sum()
        return 0.5 * RIDGE * reward + STATE_RIDGE * alone

    @torch.no_grad()
    def reward(self, batches: _Batches, basis: Tensor, fingerprint: str) -> ContextReward:
        """Return the reward of states that are not standardised, and of rows of the head."""
        readers = self.readers / batches.deviation
        offsets = -readers @ batches.mean
        back = (basis / basis.square().sum(0)).T  # the directions of the basis are orthogonal
        readers = torch.cat([readers, offsets[:, None]], 1)
        return ContextReward(readers, self.writers @ back, fingerprint)


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
        batch = batches.read(rows)
        logits = model(batch.with_dropout())
        loss = sum((log_loss(one, batch.scores) for one in logits), start=model.penalty())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        on_progress(done, total)


@torch.inference_mode()
def _held_out_loss(model: _Model, batches: _Batches) -> dict[str, float]:
    """Return the mean log-loss on held-out tokens, and the standard error of its improvement."""
    data, rows = batches.data, batches.held_out
    losses = torch.zeros(2, len(rows), dtype=torch.float64)
    for part in torch.split(torch.arange(len(rows)), BATCH):
        batch = batches.read(rows[part])
        each = [log_loss(one, batch.scores, reduction="none") for one in model(batch)]
        losses[:, part] = torch.stack(each).double()
    without, loss = losses.mean(1).tolist()
    deviations = losses[0] - losses[1] - (without - loss)
    sums = torch.zeros(len(data.scores), dtype=torch.float64)
    sums.index_add_(0, data.texts[rows].long(), deviations)
    error = float(sums.square().sum().sqrt()) / len(rows)
    return {"loss_without": without, "loss": loss, "standard_error": error}
