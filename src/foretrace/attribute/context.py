"""Context rewards: rewards of tokens that depend on the last hidden state of an LM."""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from foretrace.errors import InvalidInputError


@dataclass(frozen=True, eq=False)
class ContextReward:
    """A sum of r rewards, each a function of the context times a function of the token.

    The reward of token x after a text whose last hidden state is h is the sum over j of
    (readers_j . [h, 1]) * (writers_j . (W_x - mean of W)), with W_x the row of the LM's head.

    Attributes:
        readers: What each component reads of the hidden state, (r, d + 1) float32.
        writers: Which tokens it rewards, (r, d) float32.
        fingerprint: `Head.fingerprint` of the LM.

    Raises:
        InvalidInputError: If the shapes do not match, or numbers are not finite.

    Example:
        >>> from foretrace.attribute import ContextReward
        >>> reward = ContextReward(torch.ones(1, 3), torch.ones(1, 2), "sha256:0")
        >>> reward.joined(reward.scaled(-2.0)).writers
        tensor([[ 1.,  1.],
                [-2., -2.]])
    """

    readers: Tensor
    writers: Tensor
    fingerprint: str

    def __post_init__(self) -> None:
        for name in ("readers", "writers"):
            object.__setattr__(self, name, getattr(self, name).detach().cpu().float())
        rank, width = self.writers.shape if self.writers.ndim == 2 else (0, 0)
        if not rank or not width or self.readers.shape != (rank, width + 1):
            raise InvalidInputError(
                f"A context reward needs readers of shape (r, d + 1) and writers of shape (r, d), "
                f"not {tuple(self.readers.shape)} and {tuple(self.writers.shape)}."
            )
        if not all(bool(part.isfinite().all()) for part in (self.readers, self.writers)):
            raise InvalidInputError("The numbers of a context reward must be finite.")
        if not isinstance(self.fingerprint, str) or not self.fingerprint:
            raise InvalidInputError(
                "A context reward needs the fingerprint of the LM's head: Head.fingerprint."
            )

    def __len__(self) -> int:
        return len(self.writers)

    @property
    def width(self) -> int:
        """The number of dimensions of the hidden state, d."""
        return self.writers.shape[1]

    def scaled(self, factor: float) -> Self:
        """Return the reward times a factor."""
        return replace(self, writers=factor * self.writers)

    def joined(self, other: Self | None) -> Self:
        """Return the sum with another reward, if there is one.

        Raises:
            InvalidInputError: If the rewards belong to different LMs.
        """
        if other is None:
            return self
        if (other.fingerprint, other.width) != (self.fingerprint, self.width):
            raise InvalidInputError(
                f"The context rewards belong to different LMs, whose heads are {self.fingerprint} "
                f"and {other.fingerprint}. Combine attributes that were fitted with one LM."
            )
        parts = zip((self.readers, self.writers), (other.readers, other.writers), strict=True)
        readers, writers = (torch.cat(pair) for pair in parts)
        return replace(self, readers=readers, writers=writers)
