"""Ends of texts that steering leaves as probable as they were."""

import torch
from torch import Tensor

from foretrace.lookahead.tables import never_in


class Ends:
    """Ends of texts whose probability steering must not change: what it was."""

    def __init__(self, logits: Tensor, rows: list[int], tokens: Tensor) -> None:
        self.rows = torch.tensor(rows, device=logits.device)[:, None]
        self.tokens = tokens.to(logits.device)
        self.own = logits[self.rows, self.tokens]
        self.others = self._others(logits)

    def _others(self, logits: Tensor) -> Tensor:
        """Give the log-probability of all other tokens together, up to a constant: (n, 1)."""
        rows = logits[self.rows[:, 0]]
        rows[:, self.tokens] = -torch.inf
        return rows.logsumexp(-1, keepdim=True)

    def restore(self, logits: Tensor) -> None:
        """Let ends stand to all others as they stood before; what is impossible stays so."""
        change = self._others(logits) - self.others
        steered = logits[self.rows, self.tokens]
        own = self.own + change.nan_to_num(0.0, 0.0, 0.0)
        logits[self.rows, self.tokens] = torch.where(steered <= never_in(logits), steered, own)
