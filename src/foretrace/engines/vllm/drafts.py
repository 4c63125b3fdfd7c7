"""States of requests under speculative decoding, for vLLM's model runner V2.

A request has a row of logits for its last certain token and one for each drafted token after it.
Each row has a state. Only the device knows how many drafts of a step were accepted: the position
of the last certain token in the next step tells.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from foretrace.engines.vllm.core import RequestEntry, SteeringCore
from foretrace.steering.batch_index import to_device

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext


class SteeredRequest(NamedTuple):
    """A steered request of a step, whose prompt is complete."""

    entry: RequestEntry
    rows: range
    """Its rows of the logits: one for its last token, then one for each drafted token."""
    length: int
    """Tokens of the prompt, generated and drafted, at most. Exact if there are no drafts."""

    @property
    def num_generated(self) -> int:
        """Generated and drafted tokens, at most."""
        return self.length - self.entry.prompt_length


class _Depth(NamedTuple):
    """The rows of a step that follow the same number of drafted tokens."""

    slots: list[int]  # the slot of each row in the steering
    counts: list[int]  # generated and drafted tokens of each at most
    rows: list[int]


class DraftedStates:
    """The states of all rows, one for each drafted token of a request."""

    def __init__(self, core: SteeringCore, num_drafts: int, num_requests: int) -> None:
        """Create the states.

        Args:
            core: The steering.
            num_drafts: Drafted tokens of a request in a step at most.
            num_requests: Requests in a batch at most.
        """
        self.core, self.width = core, num_drafts + 1
        # The position of the last token before the drafts, in the step before.
        self.positions = torch.zeros(num_requests, dtype=torch.long, device=core.hmm.device)

    def update(
        self, requests: Sequence[SteeredRequest], context: "LogitsContext", num_rows: int
    ) -> list[int | None]:
        """Update the states of steered rows; return the slot of each row.

        Args:
            requests: The steered requests. Those without a state were read in this step.
            context: The step.
            num_rows: The number of rows of the logits.
        """
        steering, device = self.core.steering, self.positions.device
        tokens = context.input_ids.long().clamp_min(0)  # vLLM marks drafts that are not set by -1
        slots: list[int | None] = [None] * num_rows
        for depth, part in enumerate(self._depths(requests)):
            rows = to_device(part.rows, device)
            # The state after the draft before, or after the accepted drafts of the last step.
            distance: Tensor | int = -1
            moved = None
            if depth == 0:
                distance, moved = self._accepted(requests, context.pos[rows].long())
            steering.copy_(part.slots, distance, part.counts)
            steering.advance(part.slots, tokens[rows], moved)
            for row, slot in zip(part.rows, part.slots, strict=True):
                slots[row] = slot
        for one in requests:
            one.entry.num_generated = one.num_generated
        return slots

    def _accepted(
        self, requests: Sequence[SteeredRequest], positions: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the accepted drafts of the step before, and which requests have moved: (n,)."""
        index = to_device([one.entry.slot_id for one in requests], positions.device)
        new = [one.entry.num_generated is None for one in requests]
        accepted = (positions - self.positions[index] - 1).clamp(0, self.width - 1)
        self.positions[index] = positions
        if not any(new):
            return accepted, None
        is_new = to_device(new, positions.device)
        return torch.where(is_new, 0, accepted), ~is_new

    def _depths(self, requests: Sequence[SteeredRequest]) -> Iterator[_Depth]:
        """Yield the rows by the number of drafted tokens before them."""
        for depth in range(max((len(one.rows) for one in requests), default=0)):
            part = [one for one in requests if len(one.rows) > depth]
            yield _Depth(
                [one.entry.slot_id * self.width + depth for one in part],
                [one.num_generated for one in part],
                [one.rows[depth] for one in part],
            )


def rows_of_requests(
    context: "LogitsContext", prefill_lengths: Sequence[int], num_rows: int, width: int
) -> list[range]:
    """Return the rows of each request of a batch.

    vLLM does not say on the host how many they are. A request has one row until its prompt is
    complete, and `width` rows later, unless the scheduler has cut its drafts: then the device must
    be asked, and waited for.

    Args:
        context: The step.
        prefill_lengths: The tokens of each request that are not generated one by one.
        num_rows: The number of rows of the logits.
        width: One more than the drafted tokens of a request at most.
    """
    lengths = context.seq_lens_upper_bound_np.tolist()  # padded where vLLM uses CUDA graphs
    counts = [
        width if length > prefill else 1
        for length, prefill in zip(lengths, prefill_lengths, strict=False)
    ]
    if sum(counts) != num_rows:
        rows_by_request = Counter(context.expanded_idx_mapping.tolist())
        counts = [rows_by_request[index] for index in context.idx_mapping_np.tolist()]
    ends = list(accumulate(counts))
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
