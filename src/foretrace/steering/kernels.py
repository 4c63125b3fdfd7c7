"""The log-factors of all next tokens, for all goals of a batch in a fixed number of operations."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from foretrace.attribute.transform import log_common, log_transformed
from foretrace.hmm import inference
from foretrace.hmm.probability import transposed
from foretrace.lookahead.kernels import (
    GoalGroup,
    ScaledTerms,
    expected_weight_,
    log_eap_,
    scale_terms,
)
from foretrace.lookahead.tables import LOG_ZERO, log_zero_for
from foretrace.steering.batch_index import (
    AutomatonIndex,
    AutomatonRows,
    BatchIndex,
    Columns,
    Kernels,
)
from foretrace.steering.pool import TablePool
from foretrace.steering.state import SlotCounters, SlotState

MIN_BLOCK_TOKENS = 1024
NEGLIGIBLE = 1e4  # nats: targets that are so much less probable than the best are not chosen
MIN_LOG_PAST = -1e9  # for a past of weight 0: numbers that are added to it keep their digits


class Remaining(NamedTuple):
    """How many tokens may follow the next one: (n,) each."""

    allowed: Tensor
    """Up to the limit, or to the end of the window."""
    ahead: Tensor
    """The same, up to the request's horizon."""


def tokens_remaining(counters: SlotCounters, index: BatchIndex) -> Remaining:
    """Compute how many tokens may follow the next one."""
    limit = torch.minimum(index.rows.limit, counters.end)
    allowed = (limit - counters.num_generated - 1).clamp_min_(0)
    return Remaining(allowed, torch.minimum(allowed, index.rows.horizon))


def _default_states(counters: SlotCounters, rows: AutomatonRows, pool: TablePool) -> Tensor:
    """Return the automaton state of every row after a token of class 0: (n,)."""
    before = counters.automaton_state[rows.rows]
    after = pool.transitions.data[rows.transitions + before * rows.num_classes]
    return torch.zeros_like(counters.num_generated).index_copy_(0, rows.rows, after)


def _log_scales(table: Tensor, rows: Tensor, index: BatchIndex, pool: TablePool) -> Tensor:
    """Return the log-scales of tables, with the power of required text: like `table`.

    Args:
        table: Rows of the pool's tables, (C,) or (C, D).
        rows: The row of the index of each column, (C,) or (C, 1).
        index: The index.
        pool: The pool.
    """
    log_scales = pool.log_scales.data[table]
    if index.required_power is None:
        return log_scales
    return log_scales.addcmul_(index.required_power[rows], pool.log_missing.data[table])


@dataclass(frozen=True, eq=False)
class ColumnValues:
    """Values of every column and goal that all tokens share: n rows, C columns, G goals."""

    predicted: Tensor  # (n, h)
    weighted: Tensor  # (C, h): predicted times the table
    average: Tensor  # (C, 1): the sum of `weighted`
    terms: ScaledTerms

    @classmethod
    def gather(
        cls, state: SlotState, counters: SlotCounters, index: BatchIndex, pool: TablePool
    ) -> "ColumnValues":
        """Gather the tables of all columns, for tokens of class 0 if there is an automaton."""
        columns = index.columns
        remaining = tokens_remaining(counters, index)
        ahead = remaining.ahead[columns.rows]
        if index.automata is not None:
            # A constraint may be satisfied at any time: the request's horizon does not apply.
            constrained = columns.constrained.bool()
            ahead = torch.where(constrained, remaining.allowed[columns.rows], ahead)
        ahead = torch.minimum(ahead, columns.table_horizon)
        table = columns.tables + ahead * columns.table_stride
        if index.automata is not None:
            default = _default_states(counters, index.automata, pool)
            table = table + default[columns.rows] * columns.constrained
        predicted = state.predicted[index.rows.slots]
        weighted = pool.tables.data[table] * _of_rows(predicted, index)
        past = state.log_past.view(-1)[columns.past]
        terms = scale_terms(
            index.groups,
            columns.goals,
            len(index.scale),
            index.coefficients,
            index.log_coefficients,
            past + _log_scales(table, columns.rows, index, pool),
        )
        return cls(predicted, weighted, weighted.sum(1, keepdim=True), terms)

    def blocks(self, pool: TablePool, elements: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield blocks of tokens with their probabilities in every row and column: (b, n + C)."""
        beliefs = torch.cat([self.predicted, self.weighted]).T
        size = max(MIN_BLOCK_TOKENS, elements // beliefs.shape[1])
        yield from pool.hmm.emission.predict_blocks(beliefs, size)


def _of_rows(values: Tensor, index: BatchIndex) -> Tensor:
    """Return the values of every column's row: (n, ...) -> (C, ...)."""
    return values if index.one_column_per_row else values[index.columns.rows]


def add_log_factors(
    logits: Tensor, index: BatchIndex, pool: TablePool, kernels: Kernels, values: ColumnValues
) -> Tensor:
    """Add log f(EAP) of all goals, less what all tokens share: (n, V or more) -> the same.

    The result is in float32 at least, whatever the logits are in.
    """
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    known = pool.hmm.vocab_size
    steered = torch.empty_like(logits, dtype=dtype)
    for block, product in values.blocks(pool, kernels.block_elements):
        total = _block_factors(index, pool, kernels, values, block, product)
        torch.add(logits[:, block], total.to(dtype), out=steered[:, block])
    if logits.shape[1] > known:
        steered[:, known:] = logits[:, known:]
    return steered


def _block_factors(
    index: BatchIndex,
    pool: TablePool,
    kernels: Kernels,
    values: ColumnValues,
    block: slice,
    product: Tensor,
) -> Tensor:
    """Sum log f(EAP) over the goals of each row: (b, n + C) probabilities -> (n, b).

    The probabilities are overwritten.
    """
    num_rows = len(index)
    rows = product.T
    probability, joint = rows[:num_rows].add_(inference.IMPOSSIBLE), rows[num_rows:]
    ratio = expected_weight_(joint, values.average, _of_rows(probability, index))
    if not ratio.is_contiguous():
        ratio = transposed(ratio.T, by_product=kernels.transposes_by_product)
    weights = pool.weights.data[:, block][index.columns.weights]  # (C, b)
    parts = [_group_factors(index, values, group, ratio, weights) for group in index.groups]
    factors = parts[0] if len(parts) == 1 else torch.cat(parts)
    if index.one_goal_per_row:
        return factors
    return factors.new_zeros(num_rows, factors.shape[1]).index_add_(0, index.goal_rows, factors)


def _group_factors(
    index: BatchIndex, values: ColumnValues, group: GoalGroup, ratio: Tensor, weights: Tensor
) -> Tensor:
    """Compute log f(EAP) of the goals of one kind: (G', b)."""
    columns, goals = group.columns, group.goals
    log_values = log_eap_(
        group, ratio[columns], weights[columns], values.terms, index.columns.goals
    )
    if not group.is_transformed:
        return log_values
    parameters = (values.terms.log_scale[goals], index.scale[goals], index.shift[goals])
    return log_transformed(log_values, *(part.to(ratio).unsqueeze(1) for part in parameters))[0]


def take_back_rewards_(
    logits: Tensor, state: SlotState, index: BatchIndex, pool: TablePool
) -> None:
    """Subtract rewards that count once from the logits of tokens that were generated before."""
    ids = state.seen_tokens[index.rows.slots]  # (n, L)
    # Positions without a token add 0 to the last token.
    tokens = ids.clamp_max(pool.hmm.vocab_size - 1)
    logits.scatter_add_(1, tokens, pool.first_only.data[index.first_only, ids].to(logits))


@dataclass(frozen=True, eq=False)
class AutomatonStep:
    """The automata of a batch before the next token: A rows, C columns, D targets, U tokens.

    `add_log_factors` computes factors as if every next token took the automaton's default
    transition: class 0. A step replaces the factors of the tokens that an automaton lists.
    """

    index: BatchIndex
    automata: AutomatonIndex
    pool: TablePool
    state: Tensor  # (A, 1): the automaton state of each row, as an index in the pool
    first: Tensor  # (A, 1): the first transition of that state in the pool
    remaining: Tensor  # (A, 1): tokens that may follow the next one
    predicted: Tensor  # (A, h)
    weighted: Tensor  # (C, D, h): predicted times the table of each target
    coefficients: Tensor  # (C, D)
    log_scale: Tensor  # (A, D) float64
    log_common: Tensor  # (A, D) float64: summand of log f(EAP) that tokens with one target share
    base: Tensor  # (A, 1) float64: log-factors are relative to it

    @classmethod
    def gather(
        cls,
        state: SlotState,
        counters: SlotCounters,
        index: BatchIndex,
        automata: AutomatonIndex,
        pool: TablePool,
    ) -> "AutomatonStep":
        """Gather the tables of all targets."""
        rows, column_rows = automata.rows, automata.column_rows
        before = counters.automaton_state[rows.rows]
        remaining = tokens_remaining(counters, index).allowed[rows.rows]
        targets = _targets(automata, pool, before)
        columns = Columns(*torch.stack(index.columns)[:, automata.columns].unbind())
        ahead = torch.minimum(remaining[column_rows], columns.table_horizon)
        first = (columns.tables + ahead * columns.table_stride).unsqueeze(1)
        table = first + targets[column_rows]
        predicted = state.predicted[index.rows.slots[rows.rows]]
        weighted = pool.tables.data[table] * predicted[column_rows].unsqueeze(1)
        past = state.log_past.view(-1)[columns.past].clamp_min(MIN_LOG_PAST).unsqueeze(1)
        scales = _log_scales(table, columns.rows.unsqueeze(1), index, pool)
        term_scales = (past + scales).clamp_min_(LOG_ZERO)
        log_scale = _row_maximum(term_scales, column_rows, len(before))
        relative = (term_scales - log_scale[column_rows]).exp_()
        coefficients = index.coefficients[automata.columns].unsqueeze(1) * relative
        common = _common(index, automata, log_scale)
        largest = common.amax(1, keepdim=True)
        return cls(
            index,
            automata,
            pool,
            (rows.states + before).unsqueeze(1),
            (rows.transitions + before * rows.num_classes).unsqueeze(1),
            remaining.unsqueeze(1),
            predicted,
            weighted,
            coefficients.to(predicted),
            log_scale,
            common,
            torch.maximum(common.narrow(1, 0, 1), largest - NEGLIGIBLE),
        )

    def correct_(self, logits: Tensor) -> None:
        """Replace the factors of the default transition for the listed tokens: (n, V or more).

        Log-factors may differ beyond the float32 range. They are relative to a base for each row:
        the default transition's, unless it is negligible compared with the largest.
        """
        rows, tokens = self.automata.rows.rows, self.automata.tokens
        transition = self._transitions(tokens)  # (A, U)
        actual, default = self._log_factors(self.pool.target_index.data[transition])
        change = (actual - default).masked_fill_(self._too_late(transition), -torch.inf)
        listed = (rows.unsqueeze(1), tokens)
        corrected = logits[listed] + change.to(logits)
        offset = self.log_common.narrow(1, 0, 1) - self.base
        offset = offset.masked_fill(self._too_late(self.first), -torch.inf)
        logits[rows] = logits[rows] + offset.to(logits)
        logits[listed] = corrected

    def forbid_ends_(self, logits: Tensor) -> None:
        """Forbid end-of-text tokens while the constraint is not satisfied: (n, V or more).

        Their logits stay finite: if every other token is -inf, a row can still end.
        """
        if self.index.stop_ids is None:
            return
        rows = self.automata.rows
        ends = self.index.stop_ids[rows.rows]  # (A, E)
        last = self.pool.hmm.vocab_size - 1
        after = self._state_after(self._transitions(ends.clamp(0, last)))
        # Ends that the HMM does not know leave the automaton as it is.
        after = torch.where(ends <= last, after, self.state)
        unsatisfied = self.pool.min_tokens.data[after] > 0
        stops = (rows.rows.unsqueeze(1), ends.clamp_min(0))
        log_zero, before = log_zero_for(logits), logits[stops]
        end_logits = before.masked_fill(unsatisfied, log_zero).clamp_min_(log_zero)
        logits[stops] = torch.where(ends >= 0, end_logits, before)

    def _transitions(self, tokens: Tensor) -> Tensor:
        """Return the transitions of tokens in the pool: (U,) or (A, U) -> (A, U)."""
        classes = self.pool.classes.data[self.automata.rows.classes.unsqueeze(1), tokens]
        return self.first + classes

    def _state_after(self, transition: Tensor) -> Tensor:
        """Return the automaton states after transitions, as indices in the pool: (A, U)."""
        return self.automata.rows.states.unsqueeze(1) + self.pool.transitions.data[transition]

    def _too_late(self, transition: Tensor) -> Tensor:
        """Return after which transitions the constraint cannot be satisfied any more: (A, U).

        This is certain, while a small EAP is not.
        """
        return self.pool.min_tokens.data[self._state_after(transition)] > self.remaining

    def _log_factors(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Compute log f(EAP) of the listed tokens, whose targets are given: (A, U) each.

        The first is for a token's transition, relative to `base`. The second is for the default
        transition, relative to its `log_common`.
        """
        count, index = len(self.predicted), self.automata.column_rows
        beliefs = torch.cat([self.predicted, self.weighted.flatten(0, 1)]).T
        product = self.automata.emission.predict(beliefs).T  # (A + C D, U)
        probability, joint = torch.split(product, [count, len(product) - count])
        joint = joint.reshape(*self.weighted.shape[:2], -1)  # (C, D, U)
        joint = joint.add_(self.weighted.sum(-1, keepdim=True), alpha=inference.IMPOSSIBLE)
        ratio = joint * self.coefficients.unsqueeze(2)
        ratio = ratio.div_((probability + inference.IMPOSSIBLE)[index].unsqueeze(1))
        weights = self.pool.weights.data[self.automata.column_weights, self.automata.tokens]
        chosen = ratio.gather(1, target[index].unsqueeze(1)).squeeze(1)
        default = torch.zeros_like(target)
        actual = self._summed(chosen, weights, target)
        offset = self.log_common.gather(1, target) - self.base
        return actual + offset.to(actual), self._summed(ratio.select(1, 0), weights, default)

    def _summed(self, ratio: Tensor, weights: Tensor, target: Tensor) -> Tensor:
        """Sum over the terms, take the logarithm, and transform: (C, U), (C, U), (A, U) -> (A, U).

        The weights of a single term are logarithms, added after the sum.
        """
        index, logarithmic = self.automata.column_rows, self.automata.logarithmic
        parts = (ratio * torch.where(logarithmic, 1.0, weights), weights * logarithmic)
        total, log_weights = (
            ratio.new_zeros(target.shape).index_add_(0, index, part) for part in parts
        )
        log_values = total.clamp_min_(inference.IMPOSSIBLE).log_().add_(log_weights)
        return self._transformed(log_values, target)

    def _transformed(self, log_values: Tensor, target: Tensor) -> Tensor:
        """Transform the EAP of the goals that have a transform: (A, U)."""
        if not self.index.has_transforms:
            return log_values
        goals = self.automata.rows.goals
        scale, shift = (part[goals].unsqueeze(1) for part in (self.index.scale, self.index.shift))
        log_scale = self.log_scale.gather(1, target).to(log_values)
        parameters = (part.to(log_values) for part in (scale, shift))
        transformed = log_transformed(log_values.clone(), log_scale, *parameters)[0]
        return torch.where((scale == 1.0) & (shift == 0.0), log_values, transformed)


def _targets(automata: AutomatonIndex, pool: TablePool, states: Tensor) -> Tensor:
    """Return the distinct next states of automaton states, padded with the last: (A, D)."""
    rows = automata.rows
    column = torch.arange(automata.max_targets, device=states.device)
    column = torch.minimum(column, rows.num_targets.unsqueeze(1) - 1)
    return pool.targets.data[(rows.targets + states * rows.num_targets).unsqueeze(1) + column]


def _row_maximum(values: Tensor, index: Tensor, rows: int) -> Tensor:
    """Return the maximum over the columns of each row: (C, D), (C,) -> (rows, D)."""
    start = values.new_full((rows, values.shape[1]), LOG_ZERO)
    return start.scatter_reduce(0, index.unsqueeze(1).expand_as(values), values, "amax")


def _common(index: BatchIndex, automata: AutomatonIndex, log_scale: Tensor) -> Tensor:
    """Return the summand of log f(EAP) that all tokens with one target share: (A, D)."""
    if not index.has_transforms:
        return log_scale
    goals = automata.rows.goals
    scale, shift = (part[goals].unsqueeze(1) for part in (index.scale, index.shift))
    transformed = log_common(log_scale, scale, shift)
    return torch.where((scale == 1.0) & (shift == 0.0), log_scale, transformed)
