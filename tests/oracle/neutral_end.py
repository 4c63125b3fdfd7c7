"""End-of-text tokens whose probability steering leaves unchanged."""

from collections.abc import Sequence

import torch
from torch import Tensor

from foretrace.lookahead.tables import log_zero_for
from foretrace.steering.request import Request
from foretrace.steering.transfer import to_device


class NeutralEnd:
    """The logits of end-of-text tokens before steering, to restore their probability after it."""

    def __init__(self, logits: Tensor, rows: Sequence[int], ends: Sequence[Sequence[int]]) -> None:
        """Store the logits of the end-of-text tokens of some rows, equally many for each."""
        self.rows = to_device(rows, logits.device)[:, None]  # (n, 1)
        self.tokens = to_device(ends, logits.device)  # (n, ends)
        self.end_logits = logits[self.rows, self.tokens]
        self.log_others = self._log_others(logits)

    def _log_others(self, logits: Tensor) -> Tensor:
        """Return the logsumexp of the logits of all other tokens: (n, 1)."""
        others = logits[self.rows[:, 0]].scatter_(1, self.tokens, -torch.inf)
        return others.logsumexp(-1, keepdim=True)

    def forbidden(self, logits: Tensor) -> Tensor:
        """Return which end-of-text tokens are impossible in these logits: (n, ends)."""
        return logits[self.rows, self.tokens] <= log_zero_for(logits)

    def restore_(self, logits: Tensor, forbidden: Tensor) -> None:
        """Restore the probabilities of end-of-text tokens, except those of forbidden ones."""
        change = self._log_others(logits) - self.log_others
        neutral = self.end_logits + change.nan_to_num(0.0, 0.0, 0.0)
        steered = logits[self.rows, self.tokens]
        logits[self.rows, self.tokens] = torch.where(forbidden, steered, neutral)


def padded_ends(requests: Sequence[Request], vocab_size: int) -> tuple[list[int], list[list[int]]]:
    """Return the indices of requests that have end tokens, and these tokens.

    Each list of tokens is padded to the longest with its first token. Tokens outside the vocabulary
    are left out: they cannot be generated.
    """
    ends = [[token for token in request.ends if 0 <= token < vocab_size] for request in requests]
    width = max(map(len, ends), default=0)
    indices = [index for index, tokens in enumerate(ends) if tokens]
    return indices, [
        ends[index] + ends[index][:1] * (width - len(ends[index])) for index in indices
    ]
