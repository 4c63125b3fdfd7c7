"""End-of-text tokens whose probability steering leaves unchanged."""

import torch
from torch import Tensor

from foretrace.lookahead.tables import log_zero_for


class NeutralEnd:
    """The logits of end-of-text tokens before steering, to restore their probability after it."""

    def __init__(self, logits: Tensor, steered: Tensor, ends: Tensor, is_neutral: Tensor) -> None:
        """Store the logits of end-of-text tokens.

        A constraint may forbid an end. That the HMM does not know it does not forbid it.

        Args:
            logits: The language model's logits, (n, V or more).
            steered: The logits with the log-factors of the goals, (n, V or more).
            ends: End-of-text tokens of each row, (n, E).
            is_neutral: Whether they keep their probability, (n, 1) bool.
        """
        self.ends = ends
        self.is_neutral = is_neutral & (steered.gather(1, ends) > log_zero_for(steered))
        self.end_logits = logits.gather(1, ends)
        self.log_others = _log_others_(logits, ends)
        logits.scatter_(1, ends, self.end_logits)

    def restore_(self, steered: Tensor) -> None:
        """Restore the probabilities of neutral ends, except those that are forbidden."""
        end_logits = steered.gather(1, self.ends)
        change = _log_others_(steered, self.ends) - self.log_others
        neutral = self.end_logits + change.nan_to_num_(0.0, 0.0, 0.0)
        steered.scatter_(1, self.ends, torch.where(self.is_neutral, neutral, end_logits))


def _log_others_(logits: Tensor, ends: Tensor) -> Tensor:
    """Return the logsumexp of the logits of all other tokens, (n, 1); set those of ends to -inf."""
    logits.scatter_(1, ends, -torch.inf)
    return logits.logsumexp(-1, keepdim=True)
