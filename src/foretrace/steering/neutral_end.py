"""End-of-text tokens whose probability steering leaves unchanged."""

import torch
from torch import Tensor

from foretrace.lookahead.tables import log_zero_for


class NeutralEnd:
    """The logits of end-of-text tokens before steering, to restore their probability after it."""

    def __init__(self, logits: Tensor, rows: list[int], tokens: Tensor) -> None:
        self.rows = torch.tensor(rows, device=logits.device)[:, None]
        self.tokens = tokens.to(logits.device)
        self.end_logits = logits[self.rows, self.tokens]
        self.log_others = self._log_others(logits)

    def _log_others(self, logits: Tensor) -> Tensor:
        """Return the logsumexp of the logits of all other tokens: (n, 1)."""
        rows = logits[self.rows[:, 0]]
        rows[:, self.tokens] = -torch.inf
        return rows.logsumexp(-1, keepdim=True)

    def restore_(self, logits: Tensor) -> None:
        """Restore the probabilities of end-of-text tokens; forbidden ones stay forbidden."""
        change = self._log_others(logits) - self.log_others
        steered = logits[self.rows, self.tokens]
        neutral = self.end_logits + change.nan_to_num(0.0, 0.0, 0.0)
        forbidden = steered <= log_zero_for(logits)
        logits[self.rows, self.tokens] = torch.where(forbidden, steered, neutral)
