"""The log-factors of all next tokens, for all goals of a batch in a fixed number of operations."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from foretrace.attribute.transform import log_common, log_transformed
from foretrace.hmm import inference
from foretrace.hmm.probability import transposed
from foretrace.lookahead.tables import LOG_ZERO
from foretrace.steering.automaton_plan import AutomatonRows
from foretrace.steering.plan import GoalGroup, Plan
from foretrace.steering.planned import GoalKind
from foretrace.steering.pool import TablePool
from foretrace.steering.slot_state import SlotNumbers, SlotState

# The vocabulary is processed in blocks of so many probabilities; on CPUs, they fit the caches.
MAX_ELEMENTS, MAX_ELEMENTS_CPU, MIN_BLOCK_TOKENS = 1 << 27, 1 << 19, 1024


class Remaining(NamedTuple):
    """How many tokens may follow the next one: (n,) each."""

    allowed: Tensor
    """Up to the limit, or to the end of the window."""
    ahead: Tensor
    """The same, up to the request's horizon."""


def tokens_remaining(numbers: SlotNumbers, plan: Plan) -> Remaining:
    """Compute how many tokens may follow the next one."""
    limit = torch.minimum(plan.rows.limit, numbers.end)
    allowed = (limit - numbers.num_generated - 1).clamp_min_(0)
    return Remaining(allowed, torch.minimum(allowed, plan.rows.horizon))


def default_states(numbers: SlotNumbers, rows: AutomatonRows, pool: TablePool) -> Tensor:
    """Return the automaton state of every row after a token of class 0: (n,)."""
    before = numbers.automaton_state[rows.rows]
    after = pool.transitions.rows[rows.transitions + before * rows.num_classes]
    return torch.zeros_like(numbers.num_generated).index_copy_(0, rows.rows, after)


@dataclass(frozen=True, eq=False)
class ColumnValues:
    """Values of every column and goal that all tokens share: n rows, C columns, G goals."""

    predicted: Tensor  # (n, h)
    weighted: Tensor  # (C, h): predicted times the table
    average: Tensor  # (C, 1): the sum of `weighted`
    coefficients: Tensor  # (C,) times the past, divided by exp(log_scale)
    coefficient_sum: Tensor  # (G,) their sum over the terms of a goal
    log_scale: Tensor  # (G,) float64: logarithm of the factor that all next tokens share

    @classmethod
    def gather(
        cls, state: SlotState, numbers: SlotNumbers, plan: Plan, pool: TablePool
    ) -> "ColumnValues":
        """Gather the tables of all columns, for tokens of class 0 if there is an automaton."""
        columns = plan.columns
        remaining = tokens_remaining(numbers, plan)
        ahead = remaining.ahead[columns.rows]
        if plan.automata is not None:
            # A constraint may be satisfied at any time: the request's horizon does not apply.
            constrained = columns.constrained.bool()
            ahead = torch.where(constrained, remaining.allowed[columns.rows], ahead)
        ahead = torch.minimum(ahead, columns.table_horizon)
        index = columns.tables + ahead * columns.table_stride
        if plan.automata is not None:
            default = default_states(numbers, plan.automata, pool)
            index = index + default[columns.rows] * columns.constrained
        predicted = state.predicted[plan.rows.slots]
        weighted = pool.tables.rows[index] * _of_rows(predicted, plan)
        past = state.log_past.view(-1)[columns.past]
        scaled = _scaled(plan, past + pool.log_scales.rows[index])
        return cls(predicted, weighted, weighted.sum(1, keepdim=True), *scaled)

    def blocks(self, pool: TablePool) -> Iterator[tuple[slice, Tensor]]:
        """Yield blocks of tokens with their probabilities in every row and column: (b, n + C)."""
        beliefs = torch.cat([self.predicted, self.weighted]).T
        elements = MAX_ELEMENTS_CPU if beliefs.device.type == "cpu" else MAX_ELEMENTS
        size = max(MIN_BLOCK_TOKENS, elements // beliefs.shape[1])
        yield from pool.hmm.emission.predict_blocks(beliefs, size)


def _of_rows(values: Tensor, plan: Plan) -> Tensor:
    """Return the values of every column's row: (n, ...) -> (C, ...)."""
    return values if plan.one_column_per_row else values[plan.columns.rows]


def _scaled(plan: Plan, log_past: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return scaled coefficients (C,), their sums (G,) and the log-scales (G,).

    Sums are those of the differences from the largest past, for accuracy where terms cancel.
    """
    goals = plan.columns.goals
    coefficients, log_term = plan.coefficients, log_past + plan.log_coefficients
    if all(group.kind == GoalKind.LOGARITHMIC for group in plan.groups):
        return coefficients, coefficients, log_term.clamp_min_(LOG_ZERO)
    log_scale = log_past.new_full((len(plan.scale),), LOG_ZERO)
    log_scale = log_scale.scatter_reduce(0, goals, log_term, "amax")
    relative = log_past - log_scale[goals]
    scaled = coefficients * relative.exp()
    sums, rest = (
        torch.zeros_like(log_scale).index_add_(0, goals, part)
        for part in (coefficients, coefficients * relative.expm1())
    )
    return scaled, sums + rest, log_scale


def add_log_factors(logits: Tensor, plan: Plan, pool: TablePool, values: ColumnValues) -> Tensor:
    """Add log f(EAP) of all goals, less what all tokens share: (n, V or more) -> the same.

    The result is in float32 at least, whatever the logits are in.
    """
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    known = pool.hmm.vocab_size
    steered = torch.empty_like(logits, dtype=dtype)
    for block, product in values.blocks(pool):
        total = _block_factors(plan, pool, values, block, product)
        torch.add(logits[:, block], total.to(dtype), out=steered[:, block])
    if logits.shape[1] > known:
        steered[:, known:] = logits[:, known:]
    return steered


def _block_factors(
    plan: Plan, pool: TablePool, values: ColumnValues, block: slice, product: Tensor
) -> Tensor:
    """Sum log f(EAP) over the goals of each row: (b, n + C) probabilities -> (n, b).

    The probabilities are overwritten.
    """
    num_rows, epsilon = len(plan), inference.IMPOSSIBLE
    rows = product.T
    probability, joint = rows[:num_rows].add_(epsilon), rows[num_rows:]
    ratio = joint.add_(values.average, alpha=epsilon)
    ratio.div_(_of_rows(probability, plan))
    ratio = ratio if ratio.is_contiguous() else transposed(ratio.T)
    weights = pool.weights.rows[:, block][plan.columns.weights]  # (C, b)
    parts = [_group_factors(plan, values, group, ratio, weights) for group in plan.groups]
    factors = parts[0] if len(parts) == 1 else torch.cat(parts)
    if plan.one_goal_per_row:
        return factors
    return factors.new_zeros(num_rows, factors.shape[1]).index_add_(0, plan.goal_rows, factors)


def _group_factors(
    plan: Plan, values: ColumnValues, group: GoalGroup, ratio: Tensor, weights: Tensor
) -> Tensor:
    """Compute log f(EAP) of the goals of one kind: (G', b)."""
    columns, goals, epsilon = group.columns, group.goals, inference.IMPOSSIBLE
    ratio, weights = ratio[columns], weights[columns]
    if group.kind == GoalKind.LOGARITHMIC:
        log_values = ratio.clamp_min_(epsilon).log_().add_(weights)
    else:
        if group.kind == GoalKind.COMPLEMENT:  # 1 - w L = D + (1 - w) (1 - D), with D = 1 - L
            ratio.addcmul_(weights, 1 - ratio)
        else:
            ratio.mul_(weights)
        ratio.mul_(values.coefficients[columns].to(ratio).unsqueeze(1))
        count = goals.stop - goals.start
        index = plan.columns.goals[columns] - goals.start
        summed = ratio.new_zeros(count, ratio.shape[1]).index_add_(0, index, ratio)
        if group.kind == GoalKind.COMPLEMENT:  # `summed` is the sum of the complements
            summed = values.coefficient_sum[goals].to(ratio).unsqueeze(1) - summed
        log_values = summed.clamp_min_(epsilon).log_()
    if not group.transformed:
        return log_values
    parameters = (values.log_scale[goals], plan.scale[goals], plan.shift[goals])
    return log_transformed(log_values, *(part.to(ratio).unsqueeze(1) for part in parameters))[0]


def common_factors(plan: Plan, values: ColumnValues) -> Tensor:
    """Return the summand of log f(EAP) of every goal that all tokens share: (G,) float64."""
    transformed = log_common(values.log_scale, plan.scale, plan.shift)
    is_identity = (plan.scale == 1.0) & (plan.shift == 0.0)
    return torch.where(is_identity, values.log_scale, transformed)
