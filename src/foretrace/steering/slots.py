"""The steering of a batch whose sequences have slots: tensors with one row per sequence.

A step takes a fixed number of tensor operations, whatever the number of rows, goals and attributes,
and none of them waits for the device. Only when rows come, go or change places, indices are copied
to the device.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM
from foretrace.steering.automaton_factors import AutomatonStep
from foretrace.steering.log_factors import ColumnValues, add_log_factors, common_factors
from foretrace.steering.plan import Plan, build_plan
from foretrace.steering.planned import PlannedRow
from foretrace.steering.pool import TablePool
from foretrace.steering.reading import predict_after, write_slot
from foretrace.steering.request import Request
from foretrace.steering.row_rules import RowRules
from foretrace.steering.slot_state import SlotState, advance
from foretrace.steering.transfer import to_device

Observe = Callable[[Tensor, Tensor], None]


class _KeptPlan(NamedTuple):
    """The plan of an earlier step. It holds the requests, so that no other has their identity."""

    requests: list[Request | None]
    plan: Plan | None


class SlotSteering:
    """Steer the rows of a batch.

    A sequence has a slot, which `read` fills from its tokens. A step is `advance` for the slots,
    then `reweight_` for the logits.

    Attributes:
        hmm: The HMM of all goals.
        pool: The tables of all goals.
        state: The state of the slots.

    Example:
        >>> from foretrace.steering import Request, SlotSteering
        >>> request = Request((ft.Goal(ft.Lookahead(hmm, attribute, 8)),), prompt=(5,), limit=20)
        >>> steering = SlotSteering(hmm)
        >>> steering.read_generated([0], [request], [[]])
        >>> logits = steering.reweight_(torch.zeros(1, hmm.vocab_size), [0])
        >>> steering.advance([0], logits.argmax(-1))
    """

    def __init__(
        self,
        hmm: HMM,
        observe: Observe | None = None,
        *,
        absolute: bool = False,
        num_plans: int = 1,
    ) -> None:
        """Create the steering of an HMM.

        Args:
            hmm: The HMM of all goals.
            observe: Called at every step with the price of every row that has goals, (n,), which
                is the KL divergence of the steered from the bare next-token distribution in nats,
                and with whether the row is steered, (n,). The price is 0 outside a row's window.
            absolute: Whether steered logits include the summand that all tokens of a row share. It
                does not change probabilities. It grows with the sequence, until float32 cannot hold
                it together with the language model's logits.
            num_plans: How many plans of rows to keep. One is enough if a step advances and
                reweights the same rows.
        """
        self.hmm, self.observe, self.absolute = hmm, observe, absolute
        self.pool, self.state = TablePool(hmm), SlotState.empty(hmm)
        self._requests: dict[int, Request] = {}  # by slot
        self._counts: dict[int, int] = {}  # generated tokens, by slot
        self._plans: dict[tuple[object, ...], _KeptPlan] = {}  # by place, last used last
        self._num_plans = num_plans
        self._shape = (0, hmm.vocab_size)

    def advance(
        self, rows: Sequence[int | None], tokens: Tensor, moved: Tensor | None = None
    ) -> None:
        """Update the slots of rows by one token each.

        Args:
            rows: The slot of each row; None for rows without goals.
            tokens: The next token id of each row, (rows,), on the HMM's device. Tokens outside the
                HMM's vocabulary leave its belief unchanged.
            moved: Which rows have a new token, (rows,) bool, on the device; None for all.
        """
        used = [slot for slot in rows if slot is not None]
        for slot in used:
            self._counts[slot] = self._counts.get(slot, 0) + 1
        self._reserve(used)
        plan = self._plan(rows, (len(rows), self._shape[1]))
        if plan is None:
            return
        if not plan.all_rows:
            tokens = tokens[plan.rows.rows]
            moved = None if moved is None else moved[plan.rows.rows]
        advance(self.state, plan, self.pool, tokens, moved)

    def assign(self, requests: Mapping[int, Request], sources: Sequence[int] = ()) -> None:
        """Say which slots are in use; the requests of all others are dropped.

        Args:
            requests: The request of each slot in use.
            sources: Slot i takes the state of slot `sources[i]`, for the first slots, as in beam
                search. By default, all slots keep their state.
        """
        known = [source if source in self._counts else None for source in sources]
        if any(source not in (None, slot) for slot, source in enumerate(known)):
            self.state.reserve(len(sources), 1, 0)
            index = to_device(sources, self.hmm.device)
            self.state.copy_(torch.arange(len(index), device=index.device), index)
            counts = [None if source is None else self._counts[source] for source in known]
            self._counts |= {slot: count for slot, count in enumerate(counts) if count is not None}
        self._requests = dict(requests)
        if not requests:
            self._plans.clear()  # nothing holds the tables of requests that are finished
        self._counts = {slot: n for slot, n in self._counts.items() if slot in requests}

    def copy_(self, slots: Sequence[int], distance: Tensor | int, counts: Sequence[int]) -> None:
        """Let slots take the state of others.

        Args:
            slots: The slots to write.
            distance: Slot i takes the state of slot i + distance. One number for all slots, or one
                for each, (slots,), on the HMM's device.
            counts: The number of generated tokens of each at most: it need not be known exactly.
        """
        self._counts.update(zip(slots, counts, strict=True))
        self._reserve(slots)
        index = to_device(slots, self.hmm.device)
        self.state.copy_(index, index + distance)

    def reweight_(self, logits: Tensor, rows: Sequence[int | None]) -> Tensor:
        """Add the log-factors of the rows' goals to the language model's logits, in place.

        Tokens past the HMM's vocabulary are forbidden in steered rows, except neutral ends.

        Args:
            logits: The language model's logits, (rows, V or more).
            rows: The slot of each row. Rows that are None or outside their window are not changed.

        Returns:
            The same logits.

        Raises:
            InvalidInputError: If the logits do not fit the rows or the HMM's vocabulary.
        """
        if len(logits) != len(rows) or logits.shape[1] < self.hmm.vocab_size:
            raise InvalidInputError(
                f"Logits have shape {tuple(logits.shape)}, but there are {len(rows)} rows, "
                f"and the HMM knows {self.hmm.vocab_size} tokens. Is it the HMM of this LM?"
            )
        self._shape = (len(logits), logits.shape[1])
        plan = self._plan(rows, self._shape)
        if plan is None:
            if self.observe is not None:
                self.observe(logits.new_zeros(0), logits.new_zeros(0, dtype=torch.bool))
            return logits
        if plan.all_rows:
            self._steer_(logits, plan)
        else:
            steered = logits[plan.rows.rows]
            self._steer_(steered, plan)
            logits[plan.rows.rows] = steered
        return logits

    def _steer_(self, logits: Tensor, plan: Plan) -> None:
        """Reweight the logits of a plan's rows, in place: (n, V or more)."""
        state, pool = self.state, self.pool
        numbers = state.numbers_of(plan.rows.slots)
        values = ColumnValues.gather(state, numbers, plan, pool)
        steered = add_log_factors(logits, plan, pool, values)
        if plan.once is not None:
            _take_back_rewards_(steered, state, plan, pool)
        steps = [
            AutomatonStep.gather(state, numbers, plan, automata, pool)
            for automata in plan.corrections
        ]
        for step in steps:
            step.correct_(steered)
            step.forbid_ends_(steered)
        if self.absolute:
            _add_common_(steered, plan, values, steps)
        rules = RowRules.of(plan, numbers)
        measure = self.observe is not None
        prices = rules.apply_(logits, steered, self.hmm.vocab_size, measure=measure)
        if self.observe is not None and prices is not None:
            everywhere = torch.ones_like(prices, dtype=torch.bool)
            steers = everywhere if rules.is_steered is None else rules.is_steered.squeeze(1)
            self.observe(prices, steers)

    def read(
        self,
        slots: Sequence[int],
        requests: Sequence[Request],
        tokens: Tensor,
        prompt_lengths: Tensor,
        lengths: Tensor,
    ) -> None:
        """Fill slots from the tokens of sequences.

        The filter reads at most the last 128 tokens of a prompt, and all generated tokens. It
        ignores the tokens of a prompt up to the last end-of-text token. Sequences that have
        generated tokens or a marker wait for the device.

        Args:
            slots: The slot of each sequence.
            requests: The request of each sequence.
            tokens: Token ids of prompts and generated tokens, padded on the right, (n, T).
            prompt_lengths: The number of prompt tokens of each, (n,), on the CPU.
            lengths: The number of prompt and generated tokens of each, (n,), on the CPU.
        """
        if not slots:
            return
        counts = (lengths - prompt_lengths).tolist()
        self._counts.update(zip(slots, counts, strict=True))
        self._requests.update(zip(slots, requests, strict=True))
        self._reserve(slots)
        predicted = predict_after(self.hmm, tokens, prompt_lengths, lengths)
        for index, (slot, request, end) in enumerate(
            zip(slots, requests, lengths.tolist(), strict=True)
        ):
            self.state.predicted[slot] = predicted[index]
            first = end - counts[index]
            write_slot(
                self.state,
                slot,
                request,
                self.pool,
                tokens[index, :first],
                tokens[index, first:end],
            )

    def read_generated(
        self,
        slots: Sequence[int],
        requests: Sequence[Request],
        generated: Sequence[Sequence[int]],
    ) -> None:
        """Fill slots from prompts and lists of generated token ids.

        Args:
            slots: The slot of each sequence.
            requests: The request of each sequence.
            generated: The generated token ids of each, without the prompt.
        """
        if not slots:
            return
        sequences = [
            torch.tensor([*request.prompt, *tokens], dtype=torch.long)
            for request, tokens in zip(requests, generated, strict=True)
        ]
        prompt_lengths = torch.tensor([len(request.prompt) for request in requests])
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        padded = pad_sequence(sequences, batch_first=True)
        self.read(slots, requests, padded, prompt_lengths, lengths)

    def _plan(self, rows: Sequence[int | None], shape: tuple[int, int]) -> Plan | None:
        """Return the plan of rows, from an earlier step if they and their requests are the same."""
        requests = [None if slot is None else self._requests[slot] for slot in rows]
        num_terms = self.state.log_past.shape[1]
        place = (shape, num_terms, tuple(rows))
        kept = self._plans.pop(place, None)
        if kept is None or not all(map(is_, kept.requests, requests)):
            planned = [
                PlannedRow(row, slot, request)
                for row, (slot, request) in enumerate(zip(rows, requests, strict=True))
                if slot is not None and request is not None and request.goals
            ]
            plan = build_plan(planned, self.pool, shape, num_terms) if planned else None
            kept = _KeptPlan(requests, plan)
            while len(self._plans) >= self._num_plans:
                del self._plans[next(iter(self._plans))]
        self._plans[place] = kept
        return kept.plan

    def _reserve(self, slots: Sequence[int]) -> None:
        """Grow the state so that it can hold the next token of slots."""
        requests = [(slot, self._requests[slot]) for slot in slots]
        terms = [sum(len(goal.lookahead.terms) for goal in one.goals) for _, one in requests]
        lengths = [self._counts[slot] + 1 for slot, request in requests if request.counts_once]
        largest = [max(part, default=0) for part in (slots, terms, lengths)]
        self.state.reserve(largest[0] + 1, *largest[1:])


def _take_back_rewards_(logits: Tensor, state: SlotState, plan: Plan, pool: TablePool) -> None:
    """Subtract rewards that count once from the logits of tokens that were generated before."""
    ids = state.distinct[plan.rows.slots]  # (n, L)
    # Positions without a token add 0 to the last token.
    tokens, added = ids.clamp_max(pool.hmm.vocab_size - 1), pool.once.rows[plan.once, ids]
    logits.scatter_add_(1, tokens, added.to(logits))


def _add_common_(
    logits: Tensor, plan: Plan, values: ColumnValues, steps: Sequence[AutomatonStep]
) -> None:
    """Add the summands that all tokens of a row share."""
    common = common_factors(plan, values)
    for step in steps:
        common = common.index_copy(0, step.automata.rows.goals, step.base.squeeze(1))
    total = torch.zeros(len(plan), dtype=torch.float64, device=logits.device)
    logits += total.index_add_(0, plan.goal_rows, common)[:, None].to(logits)
