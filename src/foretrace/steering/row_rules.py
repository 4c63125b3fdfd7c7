"""Rules for the steered logits of each row by itself.

They are the limit of the price, end-of-text tokens that keep their probability, and the window
outside of which a row is not steered.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from foretrace.hmm.probability import row_blocks
from foretrace.lookahead.price import limit_prices_
from foretrace.lookahead.tables import log_zero_for
from foretrace.steering.normalisers import Normalisers
from foretrace.steering.plan import Plan
from foretrace.steering.slot_state import SlotNumbers


class RowRules(NamedTuple):
    """The rules of n rows; None where no row has such a rule."""

    max_price: Tensor | None  # (n, 1) float32: nats that a step may cost
    ends: Tensor | None  # (n, E): tokens that end a text; None if no row keeps their probability
    is_copy: Tensor | None  # (n, E) bool: whether an end is in an earlier column, too
    is_neutral: Tensor | None  # (n, 1) bool: whether ends keep their probability
    is_steered: Tensor | None  # (n, 1) bool: whether the next token is in the window

    @classmethod
    def of(cls, plan: Plan, numbers: SlotNumbers) -> "RowRules":
        """Return the rules of the rows of a plan."""
        is_steered = None
        if plan.has_windows:
            # A marker may come so late that a required text does not fit into the limit.
            fits = plan.rows.limit - numbers.begin >= plan.rows.min_tokens
            is_steered = (numbers.in_window & fits).unsqueeze(1)
        ends, is_copy, is_neutral = plan.neutral_ends or (None, None, None)
        return cls(plan.max_price, ends, is_copy, is_neutral, is_steered)

    def apply_(
        self, logits: Tensor, steered: Tensor, vocab_size: int, *, measure: bool
    ) -> Tensor | None:
        """Replace the language model's logits by steered ones that obey the rules.

        Args:
            logits: The language model's logits, (n, V or more). They are replaced.
            steered: The same with the goals' log-factors, (n, V or more). They are overwritten.
            vocab_size: The number of tokens that the HMM knows. All others are forbidden, except
                ends that keep their probability.
            measure: Whether to compute prices.

        Returns:
            If they are computed, the prices of the rows in nats, (n,); 0 outside the window.
        """
        blocks = row_blocks(logits)
        if len(blocks) == 1:
            return self._apply_(logits, steered, vocab_size, measure)
        parts = [
            self._part(rows)._apply_(logits[rows], steered[rows], vocab_size, measure)
            for rows in blocks
        ]
        return torch.cat([part for part in parts if part is not None]) if measure else None

    def _part(self, rows: slice | Tensor) -> "RowRules":
        """Return the rules of some of the rows."""
        return RowRules(*(None if part is None else part[rows] for part in self))

    def _apply_(
        self, logits: Tensor, steered: Tensor, vocab_size: int, measure: bool
    ) -> Tensor | None:
        is_neutral = None
        if self.ends is not None and self.is_neutral is not None:
            # A constraint may forbid an end. That the HMM does not know it does not forbid it.
            is_possible = steered.gather(1, self.ends) > log_zero_for(steered)
            is_neutral = self.is_neutral & is_possible
        if steered.shape[1] > vocab_size:
            steered[:, vocab_size:] = -torch.inf
        price = None
        if measure or is_neutral is not None or self.max_price is not None:
            normalisers = self._limited(logits, steered, priced=measure)
            if self.ends is not None and is_neutral is not None:
                normalisers = normalisers.with_neutral_ends(is_neutral)
                steered.scatter_(1, self.ends, normalisers.steered_ends)
            price = normalisers.prices() if measure else None
        if self.is_steered is None:
            logits.copy_(steered)
            return price
        torch.where(self.is_steered, steered, logits, out=logits)
        return None if price is None else torch.where(self.is_steered.squeeze(1), price, 0.0)

    def _limited(self, logits: Tensor, steered: Tensor, *, priced: bool) -> Normalisers:
        """Limit the prices of rows, in place, and return the normalisers of the result."""
        on_cpu = steered.device.type == "cpu"
        if self.max_price is not None and not on_cpu:
            limit_prices_(logits, steered, self.max_price)
        if self.max_price is None or not on_cpu:
            return self._normalisers(logits, steered, priced=priced)
        # Few rows exceed their limit, and nothing waits on a CPU.
        normalisers = self._normalisers(logits, steered, priced=True)
        if self.ends is not None:
            steered.scatter_(1, self.ends, normalisers.steered_ends)
        rows = (normalisers.prices() > self.max_price.squeeze(1)).nonzero()[:, 0]
        if len(rows):
            bare, limited = logits[rows], steered[rows]
            limit_prices_(bare, limited, self.max_price[rows])
            steered[rows] = limited
            normalisers.replace_(rows, self._part(rows)._normalisers(bare, limited, priced=True))
        return normalisers

    def _normalisers(self, logits: Tensor, steered: Tensor, *, priced: bool) -> Normalisers:
        ends, is_copy = self.ends, self.is_copy
        if ends is None or is_copy is None:
            ends = torch.empty(len(logits), 0, dtype=torch.long, device=logits.device)
            is_copy = ends.bool()
        return Normalisers.of(logits, steered, ends, is_copy, priced=priced)
