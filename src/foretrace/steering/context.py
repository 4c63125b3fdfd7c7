"""Context rewards of the goals in use: what the LM's last hidden state adds to logits."""

from typing import NamedTuple

import torch
from torch import Tensor

from foretrace.attribute import ContextReward
from foretrace.context import Probe
from foretrace.hmm import HMM
from foretrace.steering.slab import Slab


class ContextIndex(NamedTuple):
    """The rows of a batch that have context rewards: n of them, with at most r components."""

    rows: Tensor | None  # (n,): index in `RowIndex`; None if all rows have context rewards
    components: Tensor  # (n, r): rows of the pool; 0 for none

    def of_rows(self, values: Tensor) -> Tensor:
        """Return the values of these rows, from values of all rows."""
        return values if self.rows is None else values[self.rows]


class ContextPool:
    """The probe of an LM on a device, and the components of context rewards.

    Attributes:
        probe: The probe.
        features: Its features of the tokens that the HMM knows, (k, V) float32. Ends of text have
            none: they are not rewarded.
        readers: What components read of the hidden state, (rows, d + 1). Row 0 is zero.
        writers: Which tokens they reward, as coefficients of the features: (rows, k).
    """

    def __init__(self, probe: Probe, hmm: HMM) -> None:
        """Copy a probe to the device of an HMM."""
        self.probe = probe.to(hmm.device)
        features = probe.features[: hmm.vocab_size].to(torch.float32, copy=True)
        features[[token for token in hmm.config.eos_token_ids if token < len(features)]] = 0.0
        self.features = features.T.contiguous().to(hmm.device)
        width, count = probe.basis.shape
        self.readers = Slab((width + 1,), torch.float32, hmm.device)
        self.writers = Slab((count,), torch.float32, hmm.device)
        self.readers.write(torch.zeros(1, width + 1))
        self.writers.write(torch.zeros(1, count))

    @property
    def nbytes(self) -> int:
        """The size in bytes, with the probe and with rows that are not in use."""
        tensors = [one for one in vars(self.probe).values() if isinstance(one, Tensor)]
        owned = [self.features, self.readers.data, self.writers.data]
        return sum(one.nbytes for one in (*tensors, *owned))

    def write(self, reward: ContextReward) -> int:
        """Copy the components of a reward, and return the row of the first."""
        readers = self.readers.write(reward.readers)
        writers = self.writers.write(self.probe.project(reward.writers))
        assert readers == writers  # both slabs have the same history
        return readers

    def free(self, first: int, count: int) -> None:
        """Give components back."""
        self.readers.free(first, count)
        self.writers.free(first, count)

    def add_rewards_(
        self, steered: Tensor, logits: Tensor, index: ContextIndex, *, solve: bool
    ) -> Tensor:
        """Add the context rewards of rows to steered logits, in place.

        Args:
            steered: The logits to change, (N, V or more).
            logits: The language model's logits, (N, V or more).
            index: The rows and their components.
            solve: See `Probe.read`.

        Returns:
            Whether the hidden state of each indexed row was readable, (n,). The others get no
            rewards.
        """
        read_logits = index.of_rows(logits)[:, : self.probe.vocab_size]
        states, readable = self.probe.read(read_logits, solve=solve)
        known = torch.cat([states, readable.unsqueeze(1)], 1)  # [h, 1], or all zero
        read = self.readers.data[index.components].bmm(known.unsqueeze(2))  # (n, r, 1)
        directions = (read * self.writers.data[index.components]).sum(1)  # (n, k)
        rewards = (directions @ self.features).to(steered.dtype)
        target = steered[:, : rewards.shape[1]]
        if index.rows is None:
            target.add_(rewards)
        else:
            target.index_add_(0, index.rows, rewards)
        return readable
