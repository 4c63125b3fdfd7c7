"""Correct the logits of tokens that take a non-default automaton transition.

A `GoalGroup` computes factors as if every next token took the automaton's default transition, which
is the transition of token class 0. This module computes the factors of the tokens of all other
classes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretrace.attribute.transform import log_common, log_transformed
from foretrace.hmm import inference
from foretrace.hmm.probability import blocks_of
from foretrace.lookahead.device_automaton import DeviceAutomaton
from foretrace.lookahead.lookahead import Lookahead
from foretrace.lookahead.tables import LOG_ZERO, log_zero_for
from foretrace.steering.transfer import to_device
from oracle.goal_group import transform_tensors
from oracle.neutral_end import padded_ends
from oracle.state import GoalState, SequenceState, goal_states

MAX_ELEMENTS = 1 << 22  # of a block's product
NEGLIGIBLE = 1e4  # nats: targets that are so much less probable than the best are not chosen
MIN_LOG_PAST = -1e9  # for a past of weight 0: numbers that are added to it keep their digits


@dataclass
class ConstraintCorrection:
    """Goals of several rows with one lookahead, and so with one automaton."""

    lookahead: Lookahead
    automaton: DeviceAutomaton
    states: list[GoalState] = field(default_factory=list)

    @property
    def rows(self) -> list[int]:
        """Return the row of each goal in the batch."""
        return [state.row for state in self.states]

    def correct_(self, logits: Tensor) -> Tensor:
        """Replace the factors of the automaton's tokens, and return each row's base: (n,).

        Log-factors may differ beyond the float32 range. They are stored relative to a per-row
        base: that of the default transition, unless it is negligible beside the largest.
        """
        factors = _TransitionFactors(self.lookahead, self.automaton, self.states)
        automaton_states = factors.automaton_states
        rows = to_device(self.rows, logits.device)[:, None]
        default_too_late, listed_too_late = self._too_late(automaton_states)
        corrected = []
        for block, actual, default in factors.blocks():  # (n, m) each
            tokens = self.automaton.tokens[block].to(logits.device)
            change = (actual - default).masked_fill(listed_too_late[:, block], -torch.inf)
            corrected.append((tokens, logits[rows, tokens] + change.to(logits)))
        offset = factors.log_common[:, 0] - factors.base
        self._add_(logits, rows, offset.masked_fill(default_too_late, -torch.inf).to(logits))
        for tokens, steered in corrected:
            logits[rows, tokens] = steered
        self._forbid_ends_(logits, rows, automaton_states)
        return factors.base

    def _add_(self, logits: Tensor, rows: Tensor, offsets: Tensor) -> None:
        """Add an offset, (n,), to all tokens of each row; on CPUs, skip offsets of 0."""
        if logits.device.type == "cpu":
            for row, offset in zip(self.rows, offsets.tolist(), strict=True):
                if offset:
                    logits[row] += offset
        else:
            logits[rows[:, 0]] += offsets[:, None]

    def _too_late(self, automaton_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return after which tokens the constraint cannot be satisfied any more.

        Unlisted tokens: (n,); listed tokens: (n, M). This is certain, while a small EAP is not.
        """
        remaining = to_device(
            [state.tokens_after_next for state in self.states], automaton_states.device
        )
        needed = self.automaton.min_tokens[self.automaton.transitions[automaton_states]]  # (n, C)
        return needed[:, 0] > remaining, needed[:, self.automaton.classes] > remaining[:, None]

    def _forbid_ends_(self, logits: Tensor, rows: Tensor, automaton_states: Tensor) -> None:
        """Forbid end-of-text tokens while the constraint is not satisfied.

        Their logits stay finite: if every other token is -inf, a row can still end.
        """
        requests = [state.sequence.request for state in self.states]
        indices, padded = padded_ends(requests, logits.shape[1])
        if not indices:
            return
        device = automaton_states.device
        rows, ends = rows[to_device(indices, rows.device)], to_device(padded, logits.device)
        before = automaton_states[to_device(indices, device)]
        next_states = self.automaton.step(before[:, None], to_device(padded, device))
        unsatisfied = (self.automaton.min_tokens[next_states] > 0).to(logits.device)
        log_zero = log_zero_for(logits)
        end_logits = logits[rows, ends].masked_fill(unsatisfied, log_zero)
        logits[rows, ends] = end_logits.clamp_min_(log_zero)


class _TransitionFactors:
    """Factors of an automaton's listed tokens, for their transition and for the default one.

    Shapes: n rows, K terms, D distinct targets of a state, m tokens of a block.
    """

    def __init__(
        self, lookahead: Lookahead, automaton: DeviceAutomaton, states: Sequence[GoalState]
    ) -> None:
        self.lookahead, self.automaton = lookahead, automaton
        self.automaton_states = torch.cat(
            [state.automaton_state for state in states if state.automaton_state is not None]
        )  # (n,)
        targets = automaton.targets[self.automaton_states]  # (n, D)
        queries = [
            (state.tokens_after_next, row_targets)
            for state, row_targets in zip(states, targets, strict=True)
        ]
        tables = torch.stack([lookahead.table_for(*query) for query in queries])
        table_scales = torch.stack([lookahead.log_scale_for(*query) for query in queries])
        predicted = torch.stack([state.sequence.predicted for state in states])  # (n, h)
        weighted = tables * predicted[:, None, None]  # (n, K, D, h)
        self.average = weighted.sum(-1)  # (n, K, D)
        self.beliefs = torch.cat([predicted, weighted.flatten(0, 2)]).T  # (h, n (1 + K D))
        log_past = torch.stack([state.log_past for state in states]).clamp_min(MIN_LOG_PAST)
        term_scales = (log_past.unsqueeze(-1) + table_scales).clamp_min(LOG_ZERO)  # (n, K, D)
        self.log_scale = term_scales.amax(1)  # (n, D) float64
        relative = (term_scales - self.log_scale[:, None]).exp()
        self.scaled_coefficients = (lookahead.coefficients[:, None] * relative).to(predicted)
        transform = transform_tensors([state.goal for state in states], self.log_scale)
        self.transform = None if transform is None else [part.unsqueeze(-1) for part in transform]
        # (n, D): the summand of log f(EAP) that all tokens with one target share
        self.log_common = self.log_scale
        if self.transform is not None:
            self.log_common = log_common(self.log_scale, *self.transform)
        largest = self.log_common.amax(1)
        self.base = torch.maximum(self.log_common[:, 0], largest - NEGLIGIBLE)  # (n,)

    def blocks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield blocks of listed tokens with their log-factors, (n, m) each.

        The first is for the token's transition, relative to `base`. The second is for the default
        transition, relative to its `log_common`.
        """
        count = len(self.automaton_states)
        target_index = self.automaton.target_index[self.automaton_states]  # (n, C)
        width = max(1, MAX_ELEMENTS // self.beliefs.shape[1])
        for block in blocks_of(len(self.automaton.tokens), width):
            product = self.automaton.emission.block(block).predict(self.beliefs)  # (m, n (1 + K D))
            joint = product[:, count:].reshape(-1, *self.average.shape)  # (m, n, K, D)
            joint, probability = joint.permute(1, 2, 3, 0), product[:, :count].T  # tokens last
            column = target_index[:, self.automaton.classes[block]]  # (n, m)
            actual = self._log_factors(joint, probability, block, column)
            default = self._log_factors(joint, probability, block, torch.zeros_like(column))
            offset = self.log_common.gather(1, column) - self.base[:, None]
            yield block, actual + offset.to(actual), default

    def _log_factors(
        self, joint: Tensor, probability: Tensor, block: slice, column: Tensor
    ) -> Tensor:
        """Compute log f(EAP) of tokens for the targets in `column`, less their `log_common`.

        (n, K, D, m), (n, m), a block of m tokens, (n, m) -> (n, m).
        """
        epsilon = inference.IMPOSSIBLE
        index = column.unsqueeze(1).expand(-1, joint.shape[1], -1)  # (n, K, m)
        ratio = joint.gather(2, index.unsqueeze(2))[:, :, 0]
        ratio = ratio.add_(self.average.gather(2, index), alpha=epsilon)
        ratio.div_((probability + epsilon).unsqueeze(1))
        coefficients = self.scaled_coefficients.gather(2, index)
        token_weights = self.lookahead.token_weights[:, self.automaton.tokens[block]]
        if self.lookahead.kind.logarithmic:
            log_values = ratio.mul_(coefficients)[:, 0].clamp_min_(epsilon).log_() + token_weights
        else:
            values = ratio.mul_(token_weights).mul_(coefficients).sum(1)
            log_values = values.clamp_min_(epsilon).log_()
        if self.transform is None:
            return log_values
        log_scale = self.log_scale.gather(1, column).to(log_values)
        transform = (part.to(log_values) for part in self.transform)
        return log_transformed(log_values, log_scale, *transform)[0]


def constraint_corrections(
    sequences: Sequence[tuple[int, SequenceState]],
) -> list[ConstraintCorrection]:
    """Group the goals that have an automaton by lookahead; those without a transform apart."""
    corrections: dict[tuple[int, bool], ConstraintCorrection] = {}
    for state in goal_states(sequences):
        lookahead = state.goal.lookahead
        if lookahead.automaton is not None:
            key = (id(lookahead), state.goal.transform.is_identity)
            correction = ConstraintCorrection(lookahead, lookahead.automaton)
            corrections.setdefault(key, correction).states.append(state)
    return list(corrections.values())
