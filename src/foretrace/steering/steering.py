"""The steering of a batch whose sequences have slots: tensors with one row per sequence.

A step takes a fixed number of tensor operations, whatever the number of rows, goals and attributes,
and none of them waits for the device. Only when rows come, go or change places, indices are copied
to the device.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM
from foretrace.steering.advance import advance
from foretrace.steering.batch_index import (
    BatchIndex,
    IndexedRow,
    Kernels,
    build_index,
    to_device,
)
from foretrace.steering.context import ContextIndex
from foretrace.steering.goal import Request
from foretrace.steering.kernels import (
    AutomatonStep,
    ColumnValues,
    add_log_factors,
    take_back_rewards_,
)
from foretrace.steering.pool import TablePool
from foretrace.steering.price import RowRules
from foretrace.steering.state import NEVER, SlotCounters, SlotState, predict_after


class StepPrices(NamedTuple):
    """What a step costs: the KL divergence of the steered from the bare next-token distribution."""

    nats: Tensor  # (n,), for every row with a goal; 0 outside its window
    is_steered: Tensor  # (n,) bool: whether the row is inside its window


@dataclass
class _KeptIndex:
    """The index of an earlier step. It holds the requests, so that no other has their identity."""

    requests: list[Request | None]
    index: BatchIndex | None
    step: int
    """The number of the last step that used it."""


class Steering:
    """Steer the rows of a batch.

    A sequence has a slot. `start` takes the rows of the pool that it needs and fills the slot from
    its tokens, and `finish` gives them back. A step is `advance` for the slots, then `reweight_`
    for the logits.

    Attributes:
        hmm: The HMM of all goals.
        pool: The tables of all goals.
        state: The state of the slots.

    Example:
        >>> from foretrace.steering import Request, Steering
        >>> compiled = ft.Compiler(hmm, horizon=8).compile(ft.Goal(attribute, 2.0))
        >>> steering = Steering(hmm)
        >>> steering.start({0: Request(compiled, prompt=(5,), limit=20)})
        >>> logits = torch.zeros(1, hmm.vocab_size)
        >>> prices = steering.reweight_(logits, [0], measure=True)
        >>> steering.advance([0], logits.argmax(-1))
        >>> steering.finish([0])
    """

    def __init__(
        self, hmm: HMM, *, memory: int | None = None, kernels: Kernels | None = None
    ) -> None:
        """Create the steering of an HMM.

        Args:
            hmm: The HMM of all goals.
            memory: How many bytes the tables of goals may have on the device; see `TablePool`.
            kernels: How steps are computed; by default, what is fastest on the HMM's device.
        """
        self.hmm, self.kernels = hmm, kernels or Kernels.for_device(hmm.device)
        self.pool, self.state = TablePool(hmm, memory), SlotState.empty(hmm)
        self._requests: dict[int, Request] = {}  # by slot; their goals are in the pool
        self._counts: dict[int, int] = {}  # generated tokens at most, by slot
        self._kept: dict[tuple[object, ...], _KeptIndex] = {}
        self._step = 0
        self._unreadable = torch.zeros((), dtype=torch.long, device=hmm.device)
        self._shape = (0, hmm.vocab_size)

    @property
    def slots(self) -> Set[int]:
        """The slots in use."""
        return self._requests.keys()

    @property
    def unreadable(self) -> int:
        """How often a row had no context reward at a step, because its state was not readable.

        On a GPU, reading the number waits for the device.
        """
        return int(self._unreadable)

    def request(self, slot: int) -> Request | None:
        """Return the request of a slot. Its goal is in the pool, and holds no tables."""
        return self._requests.get(slot)

    def start(
        self, requests: Mapping[int, Request], generated: Mapping[int, Sequence[int]] | None = None
    ) -> None:
        """Begin sequences, or go on with sequences that were preempted.

        Args:
            requests: The request of each slot. It replaces the one that the slot had before.
            generated: The token ids that a slot's sequence has generated already, if any.
        """
        if not requests:
            return
        generated = generated or {}
        sequences = [
            torch.tensor([*request.prompt, *generated.get(slot, ())], dtype=torch.long)
            for slot, request in requests.items()
        ]
        prompts = torch.tensor([len(request.prompt) for request in requests.values()])
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        self.prefill(requests, pad_sequence(sequences, batch_first=True), prompts, lengths)

    def prefill(
        self,
        requests: Mapping[int, Request],
        tokens: Tensor,
        prompt_lengths: Tensor,
        lengths: Tensor,
    ) -> None:
        """Begin sequences whose token ids are in a tensor.

        The filter reads at most the last 128 tokens of a prompt, and all generated tokens. It
        ignores the tokens of a prompt up to the last end-of-text token. A goal with `after` or with
        required text waits for the device: the prompt may end with the marker, or have the text.

        Args:
            requests: The request of each slot. It replaces the one that the slot had before.
            tokens: Token ids of prompts and generated tokens, padded on the right, (n, T).
            prompt_lengths: The number of prompt tokens of each, (n,), on the CPU.
            lengths: The number of prompt and generated tokens of each, (n,), on the CPU.
        """
        slots = [slot for slot, request in requests.items() if request.goal is not None]
        prompts = {
            slot: tokens[row, :length].tolist() if request.reads_prompt else []
            for row, ((slot, request), length) in enumerate(
                zip(requests.items(), prompt_lengths.tolist(), strict=True)
            )
        }
        self._take({slot: one.with_prompt(prompts[slot]) for slot, one in requests.items()})
        if not slots:
            return
        self._counts.update(dict.fromkeys(slots, 0))
        self._reserve(max(requests))
        predicted = predict_after(self.hmm, tokens, prompt_lengths)
        for row, (slot, request) in enumerate(requests.items()):
            if request.goal is not None:
                window = request.goal.window
                begin = 0 if window.begins_after(prompts[slot]) else NEVER
                end = NEVER if window.length is None else min(NEVER, begin + window.length)
                self.state.start_(slot, predicted[row], begin, end)
        self._replay(list(requests), tokens, prompt_lengths, lengths)

    def _take(self, requests: Mapping[int, Request]) -> None:
        """Take the pool's rows for requests, then give back the rows of those that they replace."""
        pooled = {}
        goals = [request.goal for request in requests.values() if request.goal is not None]
        try:
            with self.pool.pinned(goals):
                for slot, request in requests.items():
                    if request.goal is not None:
                        pooled[slot] = request.with_goal(self.pool.acquire(request.goal))
        except BaseException:
            for request in pooled.values():
                assert request.goal is not None
                self.pool.release(request.goal)
            raise
        self.finish(requests)
        self._requests |= pooled

    def _replay(
        self, slots: Sequence[int], tokens: Tensor, prompt_lengths: Tensor, lengths: Tensor
    ) -> None:
        """Advance slots by the tokens that their sequences have generated already."""
        counts = lengths - prompt_lengths
        rows = [slot if slot in self._requests else None for slot in slots]
        for position in range(int(counts.max())):
            index = (prompt_lengths + position).clamp_max(tokens.shape[1] - 1)[:, None]
            column = tokens.gather(1, index.to(tokens.device, non_blocking=True))[:, 0]
            moved = (position < counts).to(self.hmm.device, non_blocking=True)
            self.advance(rows, column.to(self.hmm.device), moved)
        exact = zip(rows, counts.tolist(), strict=True)
        self._counts |= {slot: count for slot, count in exact if slot is not None}

    def finish(self, slots: Sequence[int] | Mapping[int, object]) -> None:
        """Give back the rows of the pool that sequences have used."""
        for slot in slots:
            request = self._requests.pop(slot, None)
            self._counts.pop(slot, None)
            if request is not None and request.goal is not None:
                self.pool.release(request.goal)
        if not self._requests:
            self._kept.clear()

    def move(self, sources: Mapping[int, int]) -> None:
        """Let slots take the state and the request of others, as in beam search.

        Args:
            sources: For each slot, the slot to copy.
        """
        changed = {slot: source for slot, source in sources.items() if slot != source}
        if not changed:
            return
        requests = {slot: self._requests.get(source) for slot, source in changed.items()}
        counts = {slot: self._counts.get(source, 0) for slot, source in changed.items()}
        # The beams of a prompt have equal requests: a step then changes the states alone.
        self._take(
            {
                slot: one
                for slot, one in requests.items()
                if one is not None
                and (slot not in self._requests or not one.steers_like(self._requests[slot]))
            }
        )
        self.finish([slot for slot, one in requests.items() if one is None])
        self._counts |= {slot: counts[slot] for slot, one in requests.items() if one is not None}
        self._reserve(max(changed))
        index = to_device([list(changed), list(changed.values())], self.hmm.device)
        self.state.copy_(*index)

    def copy_(self, slots: Sequence[int], distance: Tensor | int, counts: Sequence[int]) -> None:
        """Let slots take the state of others, whose requests they share.

        Args:
            slots: The slots to write.
            distance: Slot i takes the state of slot i + distance. One number for all slots, or one
                for each, (slots,), on the HMM's device.
            counts: The number of generated tokens of each at most: it need not be known exactly.
        """
        self._counts.update(zip(slots, counts, strict=True))
        self._reserve(max(slots))
        index = to_device(slots, self.hmm.device)
        self.state.copy_(index, index + distance)

    def advance(
        self, rows: Sequence[int | None], tokens: Tensor, moved: Tensor | None = None
    ) -> None:
        """Update the slots of rows by one token each.

        Args:
            rows: The slot of each row; None for rows without a goal.
            tokens: The next token id of each row, (rows,), on the HMM's device. Tokens outside the
                HMM's vocabulary leave its belief unchanged.
            moved: Which rows have a new token, (rows,) bool, on the device; None for all.
        """
        used = [slot for slot in rows if slot is not None]
        for slot in used:
            self._counts[slot] += 1
        self._reserve(max(used, default=-1))
        index = self._index(rows, (len(rows), self._shape[1]))
        if index is None:
            return
        if not index.all_rows:
            tokens = tokens[index.rows.logits]
            moved = None if moved is None else moved[index.rows.logits]
        advance(self.state, index, self.pool, tokens, moved)

    def reweight_(
        self, logits: Tensor, rows: Sequence[int | None], *, measure: bool = False
    ) -> StepPrices | None:
        """Add the log-factors of the rows' goals to the language model's logits, in place.

        Tokens past the HMM's vocabulary are forbidden in steered rows, except neutral ends.

        Args:
            logits: The language model's logits, (rows, V or more).
            rows: The slot of each row. Rows that are None or outside their window are not changed.
            measure: Whether to compute prices.

        Returns:
            The prices of the rows that have a goal, if `measure` is set and there are such rows.

        Raises:
            InvalidInputError: If the logits do not fit the rows or the HMM's vocabulary.
        """
        if len(logits) != len(rows) or logits.shape[1] < self.hmm.vocab_size:
            raise InvalidInputError(
                f"Logits have shape {tuple(logits.shape)}, but there are {len(rows)} rows, "
                f"and the HMM knows {self.hmm.vocab_size} tokens. Is it the HMM of this LM?"
            )
        self._shape = (len(logits), logits.shape[1])
        index = self._index(rows, self._shape)
        self._step += 1
        if index is None:
            return None
        if index.all_rows:
            return self._steer_(logits, index, measure)
        steered = logits[index.rows.logits]
        prices = self._steer_(steered, index, measure)
        logits[index.rows.logits] = steered
        return prices

    def _steer_(self, logits: Tensor, index: BatchIndex, measure: bool) -> StepPrices | None:
        """Reweight the logits of an index's rows, in place: (n, V or more)."""
        state, pool = self.state, self.pool
        counters = state.counters_of(index.rows.slots)
        values = ColumnValues.gather(state, counters, index, pool)
        steered = add_log_factors(logits, index, pool, self.kernels, values)
        rules = self._rules(index, counters)
        if index.context is not None:
            self._add_context_(steered, logits, index.context, rules.is_steered)
        if index.first_only is not None:
            take_back_rewards_(steered, state, index, pool)
        for automata in index.corrections:
            step = AutomatonStep.gather(state, counters, index, automata, pool)
            step.correct_(steered)
            step.forbid_ends_(steered)
        nats = rules.apply_(logits, steered, measure=measure)
        if nats is None:
            return None
        everywhere = torch.ones_like(nats, dtype=torch.bool)
        is_steered = everywhere if rules.is_steered is None else rules.is_steered.squeeze(1)
        return StepPrices(nats, is_steered)

    def _add_context_(
        self, steered: Tensor, logits: Tensor, index: ContextIndex, is_steered: Tensor | None
    ) -> None:
        """Add context rewards in place, and count the steered rows that were not readable."""
        assert self.pool.context is not None
        solve = self.kernels.solves_states
        missed = ~self.pool.context.add_rewards_(steered, logits, index, solve=solve)
        if is_steered is not None:
            missed &= index.of_rows(is_steered).squeeze(1)
        self._unreadable += missed.sum()

    def _rules(self, index: BatchIndex, counters: SlotCounters) -> RowRules:
        is_steered = None
        if index.has_windows:
            # A marker may come so late that a required text does not fit into the limit.
            fits = index.rows.limit - counters.begin >= index.rows.min_tokens
            is_steered = (counters.in_window & fits).unsqueeze(1)
        ends, is_copy, is_neutral = index.neutral_ends or (None, None, None)
        return RowRules(
            index.max_price,
            ends,
            is_copy,
            is_neutral,
            is_steered,
            self.hmm.vocab_size,
            self.kernels.row_elements,
            self.kernels.limits_all_rows,
        )

    def _index(self, rows: Sequence[int | None], shape: tuple[int, int]) -> BatchIndex | None:
        """Return the index of rows, from an earlier step if they and their requests are the same.

        An index that the last step has not used is dropped.
        """
        requests = [None if slot is None else self._requests.get(slot) for slot in rows]
        num_terms = self.state.log_past.shape[1]
        key = (shape, num_terms, tuple(rows))
        kept = self._kept.get(key)
        if kept is None or not all(map(is_, kept.requests, requests)):
            steered = [
                IndexedRow(row, slot, request)
                for row, (slot, request) in enumerate(zip(rows, requests, strict=True))
                if slot is not None and request is not None
            ]
            index = None
            if steered:
                index = build_index(steered, self.pool, self.kernels, shape, num_terms)
            kept = _KeptIndex(requests, index, self._step)
            recent = {k: one for k, one in self._kept.items() if one.step >= self._step - 1}
            self._kept = {**recent, key: kept}
        kept.step = self._step
        return kept.index

    def _reserve(self, largest_slot: int) -> None:
        """Make room in the state for the next token of all sequences."""
        goals = [one.goal for one in self._requests.values() if one.goal is not None]
        lengths = [
            self._counts.get(slot, 0) + 1
            for slot, request in self._requests.items()
            if request.goal is not None and request.goal.has_first_only
        ]
        terms = max((goal.num_terms for goal in goals), default=0)
        slots = max(largest_slot + 1, len(self.state.counters))
        self.state.reserve(slots, terms, max(lengths, default=0))
