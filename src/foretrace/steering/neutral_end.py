"""End-of-text tokens whose probability steering leaves unchanged."""

import torch
from torch import Tensor

from foretrace.lookahead.tables import log_zero_for
from foretrace.steering.plan import Plan


class NeutralEnd:
    """The logits of end-of-text tokens before steering, to restore their probability after it."""

    def __init__(self, logits: Tensor, plan: Plan) -> None:
        """Store the logits of the end-of-text tokens of a plan's rows: (n, V or more)."""
        assert plan.ends is not None
        self.tokens = plan.ends.clamp_min(0)  # (n, E)
        self.is_neutral = plan.rows.neutral_end.bool().unsqueeze(1)  # (n, 1)
        self.end_logits = logits.gather(1, self.tokens)
        self.log_others = self._log_others(logits)

    def _log_others(self, logits: Tensor) -> Tensor:
        """Return the logsumexp of the logits of all other tokens: (n, 1).

        The logits are changed for a moment, which saves a copy.
        """
        ends = logits.gather(1, self.tokens)
        logits.scatter_(1, self.tokens, -torch.inf)
        log_others = logits.logsumexp(-1, keepdim=True)
        logits.scatter_(1, self.tokens, ends)
        return log_others

    def forbidden(self, logits: Tensor) -> Tensor:
        """Return which end-of-text tokens are impossible in these logits: (n, E).

        A constraint may forbid an end; that the HMM does not know it does not forbid it.
        """
        return logits.gather(1, self.tokens) <= log_zero_for(logits)

    def restore_(self, logits: Tensor, forbidden: Tensor) -> None:
        """Restore the probabilities of neutral ends, except those of forbidden ones."""
        change = self._log_others(logits) - self.log_others
        neutral = self.end_logits + change.nan_to_num(0.0, 0.0, 0.0)
        steered = logits.gather(1, self.tokens)
        kept = torch.where(self.is_neutral & ~forbidden, neutral, steered)
        logits.scatter_(1, self.tokens, kept)
