"""Evidence: a classifier whose log-odds are a sum of token rewards."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Self

import torch
from torch import Tensor

from foretrace.attribute.token_ids import find_sorted
from foretrace.errors import InvalidInputError


@dataclass(frozen=True, eq=False)
class Evidence:
    """The classifier sigma(bias + sum of rewards), over the M tokens that have a reward.

    A positive reward is evidence for the attribute, a negative one against it.

    Attributes:
        bias: The log-odds of a text without rewarded tokens.
        tokens: The tokens that have a reward, (M,) int32, ascending.
        rewards: The reward of each, (M,).
        first_only: Whether only the first occurrence of a token in a text counts.
    """

    bias: float
    tokens: Tensor
    rewards: Tensor
    first_only: bool = True

    def __post_init__(self) -> None:
        ascending = bool((self.tokens[1:] > self.tokens[:-1]).all())
        same_shape = self.tokens.dim() == 1 and self.rewards.shape == self.tokens.shape
        if not same_shape or not ascending or bool((self.tokens < 0).any()):
            raise InvalidInputError(
                "Evidence needs distinct token ids in ascending order, and a reward for each."
            )
        if not (isfinite(self.bias) and bool(self.rewards.isfinite().all())):
            raise InvalidInputError("Rewards and the bias of evidence must be finite.")

    def negated(self) -> Self:
        """Return the classifier of the opposite: 1 - p."""
        return replace(self, bias=-self.bias, rewards=-self.rewards)

    def scaled(self, factor: float) -> Self:
        """Return a copy with the log-odds multiplied by a factor."""
        return replace(self, bias=factor * self.bias, rewards=factor * self.rewards)

    def without(self, tokens: Sequence[int]) -> Self:
        """Return a copy in which these tokens have no reward."""
        kept = ~torch.isin(self.tokens, torch.tensor(tokens, dtype=self.tokens.dtype))
        return replace(self, tokens=self.tokens[kept], rewards=self.rewards[kept])

    def dense(self, vocab_size: int) -> Tensor:
        """Return the reward of every token, 0 for those without one: (V,) float64."""
        rewards = torch.zeros(vocab_size, dtype=torch.float64)
        rewards[self.tokens.long()] = self.rewards.double()
        return rewards

    def log_odds(self, tokens: Tensor, text_index: Tensor, count: int) -> Tensor:
        """Compute the log-odds of each of `count` texts, (count,) float64.

        `tokens` (N,) holds the ids of all texts one after the other, and `text_index` (N,) the text
        of each token, in ascending order.
        """
        log_odds = torch.full((count,), float(self.bias), dtype=torch.float64)
        if not len(self.tokens):
            return log_odds
        index, found = find_sorted(self.tokens, tokens)
        index, text_index = index[found].long(), text_index[found].long()
        if self.first_only:
            pairs = torch.unique(text_index * len(self.tokens) + index)
            index, text_index = pairs % len(self.tokens), pairs // len(self.tokens)
        return log_odds.index_add_(0, text_index, self.rewards[index].double())
