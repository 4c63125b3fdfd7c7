"""The steering of a batch of sequences while they are generated.

States are a cache: they can be recomputed from the token ids. Token ids and states stay
on the HMM's device, and no step waits for the device.
"""

from collections.abc import Callable, Sequence
from math import inf

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM, inference
from foretrace.hmm.probability import transposed
from foretrace.lookahead.lookahead import Lookahead
from foretrace.lookahead.price import limit_prices_, prices
from foretrace.steering.request import Request
from foretrace.steering.transfer import to_device
from foretrace.steering.window import WindowState
from oracle.constraints import ConstraintCorrection, constraint_corrections
from oracle.goal_group import GoalGroup, group_by_kind
from oracle.neutral_end import NeutralEnd, padded_ends
from oracle.state import SequenceState

# The vocabulary is processed in blocks of so many probabilities; on CPUs, they fit the caches.
MAX_ELEMENTS, MAX_ELEMENTS_CPU, MIN_BLOCK_TOKENS = 1 << 25, 1 << 19, 1024
READ_BACK = 128  # last prompt tokens that the filter reads


class BatchSteering:
    """Steer the rows of a batch. It holds no rows: engines keep a `SequenceState` for each.

    A step is `read` or `advance` for the states, then `reweight_` for the logits.

    Example:
        >>> from foretrace.steering import Request
        >>> from oracle.batch import BatchSteering
        >>> request = Request((ft.Goal(ft.Lookahead(hmm, attribute, 8)),), prompt=(5,), limit=20)
        >>> steering = BatchSteering(hmm)
        >>> states = steering.read_generated([request], [[]])
        >>> logits = steering.reweight_(torch.zeros(1, hmm.vocab_size), states)
        >>> (state,) = steering.advance(states, logits.argmax(-1))
        >>> state.num_generated
        1
    """

    def __init__(
        self,
        hmm: HMM,
        observe: Callable[[Tensor], None] | None = None,
        *,
        absolute: bool = False,
    ) -> None:
        """Create the steering of an HMM.

        Args:
            hmm: The HMM of all goals.
            observe: Called at every step with the price of every steered row: the KL divergence of
                the steered from the bare next-token distribution in nats, (n,). Rows outside
                their window are not steered; there may be none.
            absolute: Whether steered logits include the summand that all tokens of a row share. It
                does not change probabilities. It grows with the sequence, until float32 cannot hold
                it together with the language model's logits.
        """
        self.hmm, self.observe, self.absolute = hmm, observe, absolute
        self._ends = torch.tensor(hmm.config.eos_token_ids, dtype=torch.long, device=hmm.device)

    def advance(self, states: Sequence[SequenceState], tokens: Tensor) -> list[SequenceState]:
        """Return the states after one more token each.

        Args:
            states: The states before.
            tokens: The next token id of each, (n,), on the HMM's device. Tokens outside the HMM's
                vocabulary leave its belief unchanged.

        Returns:
            The states after these tokens.
        """
        if not states:
            return []
        before = torch.stack([state.predicted for state in states])
        is_known = (tokens < self.hmm.vocab_size).unsqueeze(-1)
        stepped = inference.step(self.hmm, before, tokens.clamp_max(self.hmm.vocab_size - 1))
        predicted = torch.where(is_known, stepped.predicted, before)
        log_weights = _log_weights([state.request for state in states], tokens)
        return [
            _advanced(state, row_predicted, window, row_weights, token)
            for state, row_predicted, window, row_weights, token in zip(
                states,
                predicted,
                _next_windows(states, tokens),
                log_weights,
                tokens[:, None],
                strict=True,
            )
        ]

    def read(
        self,
        requests: Sequence[Request],
        tokens: Tensor,
        prompt_lengths: Tensor,
        lengths: Tensor,
    ) -> list[SequenceState]:
        """Compute the states of sequences from their tokens.

        The filter reads at most the last `READ_BACK` tokens of a prompt. It ignores its tokens up
        to the last end-of-text token, because they belong to an earlier text. Requests with a
        marker wait for the device.

        Args:
            requests: The request of each sequence.
            tokens: Token ids of prompts and generated tokens, padded on the right, (n, T).
            prompt_lengths: The number of prompt tokens of each, (n,), on the CPU.
            lengths: The number of prompt and generated tokens of each, (n,), on the CPU.

        Returns:
            The states.
        """
        if not requests:
            return []
        device = self.hmm.device
        starts = (prompt_lengths - READ_BACK).clamp_min(0)
        width = int((lengths - starts).max())
        positions = starts[:, None] + torch.arange(width)  # on the CPU
        in_sequence = (positions < lengths[:, None]).to(device, non_blocking=True)
        in_prompt = (positions < prompt_lengths[:, None]).to(device, non_blocking=True)
        index = positions.clamp_max(tokens.shape[1] - 1).to(tokens.device, non_blocking=True)
        recent = tokens.gather(1, index).to(device)
        is_prompt_end = torch.isin(recent, self._ends) & in_prompt
        in_earlier_text = is_prompt_end.flip(1).cumsum(1).flip(1) > 0
        mask = in_sequence & ~in_earlier_text & (recent < self.hmm.vocab_size)
        recent = recent.clamp_max(self.hmm.vocab_size - 1)
        predicted = self.hmm.initial.expand(len(requests), -1)
        for filtered in inference.scan(self.hmm, recent, mask):
            predicted = filtered.predicted
        counts = (lengths - prompt_lengths).tolist()
        ends = lengths.tolist()
        generated = [
            row[end - count : end].to(device)
            for row, count, end in zip(tokens, counts, ends, strict=True)
        ]
        windows = [
            _read_window(request, row[: end - count], row_generated)
            for request, row, count, end, row_generated in zip(
                requests, tokens, counts, ends, generated, strict=True
            )
        ]
        return [
            SequenceState(
                request,
                count,
                row_predicted,
                window,
                *_goal_states(request, window.select(row_generated)),
            )
            for request, count, row_predicted, window, row_generated in zip(
                requests, counts, predicted, windows, generated, strict=True
            )
        ]

    def read_generated(
        self, requests: Sequence[Request], generated: Sequence[Sequence[int]]
    ) -> list[SequenceState]:
        """Compute the states of sequences from prompts and lists of generated token ids.

        Args:
            requests: The request of each sequence.
            generated: The generated token ids of each, without the prompt.

        Returns:
            The states.
        """
        sequences = [
            torch.tensor([*request.prompt, *tokens], dtype=torch.long)
            for request, tokens in zip(requests, generated, strict=True)
        ]
        if not sequences:
            return []
        prompt_lengths = torch.tensor([len(request.prompt) for request in requests])
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        padded = pad_sequence(sequences, batch_first=True)
        return self.read(requests, padded, prompt_lengths, lengths)

    def reweight_(self, logits: Tensor, states: Sequence[SequenceState | None]) -> Tensor:
        """Add the log-factors of the rows' goals to the language model's logits, in place.

        Tokens past the HMM's vocabulary are forbidden in steered rows, except neutral ends.

        Args:
            logits: The language model's logits, (n, V or more).
            states: The state of each row. Rows that are None, have no goals, or are outside their
                window are not changed.

        Returns:
            The same logits.

        Raises:
            InvalidInputError: If the logits do not fit the rows or the HMM's vocabulary.
        """
        if len(logits) != len(states) or logits.shape[1] < self.hmm.vocab_size:
            raise InvalidInputError(
                f"Logits have shape {tuple(logits.shape)}, but there are {len(states)} rows, "
                f"and the HMM knows {self.hmm.vocab_size} tokens. Is it the HMM of this LM?"
            )
        steered = [(row, state) for row, state in enumerate(states) if state and state.is_steered]
        if not steered:
            if self.observe is not None:
                self.observe(logits.new_zeros(0))
            return logits
        predicted = torch.stack([state.predicted for _, state in steered], 1)  # (h, n)
        groups = [
            GoalGroup(goals, predicted) for goals in group_by_kind([state for _, state in steered])
        ]
        rows = to_device([row for row, _ in steered], logits.device)
        limits = [state.request.max_price for _, state in steered]
        needs_price = self.observe is not None or min(limits) < inf
        bare = logits[rows] if needs_price else None
        neutral_end = _neutral_end(logits, steered)
        self._add_log_factors_(logits, rows, predicted, groups)
        _take_back_rewards_(logits, steered)
        corrections = constraint_corrections(steered)
        bases = [correction.correct_(logits) for correction in corrections]
        if self.absolute:
            _add_common_(logits, rows, groups, corrections, bases)
        # A constraint may forbid an end; that the HMM does not know it does not forbid it.
        forbidden_ends = None if neutral_end is None else neutral_end.forbidden(logits)
        if logits.shape[1] > self.hmm.vocab_size:
            logits[rows, self.hmm.vocab_size :] = -torch.inf
        if bare is not None and min(limits) < inf:
            steered_rows = logits[rows]
            limited, most = steered_rows.clone(), to_device(limits, logits.device).unsqueeze(1)
            limit_prices_(bare, limited, most)
            exceeds = prices(bare, steered_rows).unsqueeze(1) > most
            logits[rows] = torch.where(exceeds, limited, steered_rows)
        if neutral_end is not None and forbidden_ends is not None:
            neutral_end.restore_(logits, forbidden_ends)
        if bare is not None and self.observe is not None:
            self.observe(prices(bare, logits[rows]))
        return logits

    def _add_log_factors_(
        self, logits: Tensor, rows: Tensor, predicted: Tensor, groups: Sequence[GoalGroup]
    ) -> None:
        """Add log f(EAP) of all goals to the logits of `rows`, block by block."""
        # One product for all groups reads the emission once.
        beliefs = torch.cat([predicted, *(group.weighted for group in groups)], 1)
        elements = MAX_ELEMENTS_CPU if self.hmm.device.type == "cpu" else MAX_ELEMENTS
        block_size = max(MIN_BLOCK_TOKENS, elements // beliefs.shape[1])
        for block, product in self.hmm.emission.predict_blocks(beliefs, block_size):
            log_factors = _summed_log_factors(product, len(rows), groups, block)
            log_factors = transposed(log_factors).to(logits)
            if len(rows) == len(logits):
                logits[:, block].add_(log_factors)
            else:  # several times as fast as index_add_
                logits[:, block].index_copy_(0, rows, log_factors.add_(logits[rows, block]))


def _advanced(
    state: SequenceState,
    predicted: Tensor,
    window: WindowState,
    log_weights: tuple[Tensor, ...],
    token: Tensor,
) -> SequenceState:
    """Return a row's state after a token, (1,); goals do not count tokens outside the window."""
    log_past, automaton_states, generated = state.log_past, state.automaton_states, state.generated
    if state.in_window:
        log_past = tuple(past + new for past, new in zip(log_past, log_weights, strict=True))
        automaton_states = _next_automaton_states(state, token)
        generated = None if generated is None else torch.cat([generated, token])
    num_generated = state.num_generated + 1
    return SequenceState(
        state.request, num_generated, predicted, window, log_past, automaton_states, generated
    )


def _next_windows(states: Sequence[SequenceState], tokens: Tensor) -> list[WindowState]:
    """Return the windows of rows after one token each. Rows that search a marker read theirs."""
    windows = [state.window for state in states]
    searching = [
        row for row, state in enumerate(states) if state.request.window.pending(state.window)
    ]
    if searching:  # waits for the device
        for row, token in zip(searching, tokens[searching].tolist(), strict=True):
            window, num_generated = states[row].request.window, states[row].num_generated + 1
            windows[row] = window.advance(windows[row], token, num_generated)
    return windows


def _read_window(request: Request, prompt: Tensor, generated: Tensor) -> WindowState:
    """Return a row's window after a prompt and generated tokens."""
    window = request.window
    if not window.has_marker:
        return window.start(())
    return window.read(prompt.tolist(), generated.tolist())  # waits for the device


def _goal_states(
    request: Request, generated: Tensor
) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...], Tensor | None]:
    """Return the log-pasts and automaton states of a request's goals after tokens of the window.

    The third result is the tokens, (n,), if the request depends on them.
    """
    lookaheads = [goal.lookahead for goal in request.goals]
    log_pasts = tuple(lookahead.log_weights(generated).sum(0) for lookahead in lookaheads)
    automata = [lookahead.automaton for lookahead in lookaheads]
    states = tuple(automaton and automaton.run(generated) for automaton in automata)
    return log_pasts, states, generated if request.counts_once else None


def _take_back_rewards_(logits: Tensor, steered: Sequence[tuple[int, SequenceState]]) -> None:
    """Subtract rewards that count once from the logits of tokens that were generated before."""
    for row, state in steered:
        if state.generated is None or not len(state.generated):
            continue
        tokens = state.generated.to(logits.device)
        values = logits[row, tokens]
        for goal in state.request.goals:
            if goal.lookahead.once_rewards is not None:
                is_known = state.generated < goal.lookahead.hmm.vocab_size
                rewards = goal.lookahead.once_rewards[torch.where(is_known, state.generated, 0)]
                values = values - torch.where(is_known, rewards, 0.0).to(values)
        logits[row, tokens] = values  # a token that occurs twice is set to the same value twice


def _neutral_end(logits: Tensor, steered: Sequence[tuple[int, SequenceState]]) -> NeutralEnd | None:
    """Store the end-of-text tokens of rows with neutral ends; None if there are none."""
    neutral = [
        (row, state.request)
        for row, state in steered
        if any(goal.neutral_end for goal in state.request.goals)
    ]
    indices, ends = padded_ends([request for _, request in neutral], logits.shape[1])
    return NeutralEnd(logits, [neutral[index][0] for index in indices], ends) if ends else None


def _summed_log_factors(
    product: Tensor, num_rows: int, groups: Sequence[GoalGroup], block: slice
) -> Tensor:
    """Sum log f(EAP), less its common summand, over each row's goals: (b, n)."""
    widths = [group.weighted.shape[1] for group in groups]
    probability, *joints = torch.split(product, [num_rows, *widths], 1)
    total: Tensor | None = None
    for group, joint in zip(groups, joints, strict=True):
        row_probability = probability if group.covers_all_rows else probability[:, group.row_index]
        log_factors = group.log_factors(joint, row_probability, block)
        if group.covers_all_rows and total is None:
            total = log_factors  # no copy for one group
        else:
            total = torch.zeros_like(probability) if total is None else total
            total.index_add_(1, group.row_index, log_factors)
    assert total is not None  # every row here has a goal
    return total


def _add_common_(
    logits: Tensor,
    rows: Tensor,
    groups: Sequence[GoalGroup],
    corrections: Sequence[ConstraintCorrection],
    bases: Sequence[Tensor],
) -> None:
    """Add the summands that all tokens of a row share."""
    common = torch.zeros(len(logits), dtype=torch.float64, device=logits.device)
    for group in groups:
        if group.unconstrained:
            columns = to_device(group.unconstrained, group.row_index.device)
            group_rows = rows[group.row_index[columns].to(rows.device)]
            common.index_add_(0, group_rows, group.log_common[columns].to(common))
    for correction, base in zip(corrections, bases, strict=True):
        common[to_device(correction.rows, common.device)] += base.to(common)
    logits += common[:, None].to(logits)


def _log_weights(requests: Sequence[Request], tokens: Tensor) -> list[tuple[Tensor, ...]]:
    """Return the log-weights of each row's token for each of its goals, (K,) each."""
    rows_of: dict[Lookahead, list[int]] = {}
    for row, request in enumerate(requests):
        for goal in request.goals:
            rows_of.setdefault(goal.lookahead, []).append(row)
    log_weights: dict[tuple[Lookahead, int], Tensor] = {}
    for lookahead, rows in rows_of.items():
        row_weights = lookahead.log_weights(tokens[to_device(rows, tokens.device)])
        log_weights.update(zip([(lookahead, row) for row in rows], row_weights, strict=True))
    return [
        tuple(log_weights[goal.lookahead, row] for goal in request.goals)
        for row, request in enumerate(requests)
    ]


def _next_automaton_states(state: SequenceState, token: Tensor) -> tuple[Tensor | None, ...]:
    """Return the automaton states of a row's goals after a token: (1,)."""
    automata = [goal.lookahead.automaton for goal in state.request.goals]
    return tuple(
        None if automaton is None or before is None else automaton.step(before, token)
        for automaton, before in zip(automata, state.automaton_states, strict=True)
    )
