"""Replace the factors of tokens that automata list.

`log_factors` computes factors as if every next token took the automaton's default transition, that
of class 0. This module computes the factors of all tokens that an automaton of the batch lists, for
all rows with an automaton at once.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from foretrace.attribute.transform import log_common, log_transformed
from foretrace.hmm import inference
from foretrace.lookahead.tables import LOG_ZERO, log_zero_for
from foretrace.steering.automaton_plan import AutomatonPlan
from foretrace.steering.log_factors import tokens_remaining
from foretrace.steering.plan import Columns, Plan
from foretrace.steering.pool import TablePool
from foretrace.steering.slot_state import SlotNumbers, SlotState

NEGLIGIBLE = 1e4  # nats: targets that are so much less probable than the best are not chosen
MIN_LOG_PAST = -1e9  # for a past of weight 0: numbers that are added to it keep their digits


@dataclass(frozen=True, eq=False)
class AutomatonStep:
    """The automata of a batch before the next token: A rows, C columns, D targets, U tokens."""

    plan: Plan
    automata: AutomatonPlan
    pool: TablePool
    first: Tensor  # (A, 1): the first transition of each row's automaton state in the pool
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
        numbers: SlotNumbers,
        plan: Plan,
        automata: AutomatonPlan,
        pool: TablePool,
    ) -> "AutomatonStep":
        """Gather the tables of all targets."""
        rows, index = automata.rows, automata.column_rows
        before = numbers.automaton_state[rows.rows]
        remaining = tokens_remaining(numbers, plan).allowed[rows.rows]
        targets = _targets(automata, pool, before)
        columns = Columns(*torch.stack(plan.columns)[:, automata.columns].unbind())
        ahead = torch.minimum(remaining[index], columns.table_horizon)
        place = (columns.tables + ahead * columns.table_stride).unsqueeze(1) + targets[index]
        predicted = state.predicted[plan.rows.slots[rows.rows]]
        weighted = pool.tables.rows[place] * predicted[index].unsqueeze(1)
        past = state.log_past.view(-1)[columns.past].clamp_min(MIN_LOG_PAST).unsqueeze(1)
        term_scales = (past + pool.log_scales.rows[place]).clamp_min_(LOG_ZERO)
        log_scale = _row_maximum(term_scales, index, len(before))
        relative = (term_scales - log_scale[index]).exp_()
        coefficients = plan.coefficients[automata.columns].unsqueeze(1) * relative
        common = _common(plan, automata, log_scale)
        largest = common.amax(1, keepdim=True)
        return cls(
            plan,
            automata,
            pool,
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
        that of the default transition, unless it is negligible compared with the largest.
        """
        rows, tokens = self.automata.rows.rows, self.automata.tokens
        transition = self._transitions(tokens)  # (A, U)
        actual, default = self._log_factors(self.pool.target_index.rows[transition])
        change = (actual - default).masked_fill_(self._too_late(transition), -torch.inf)
        place = (rows.unsqueeze(1), tokens)
        corrected = logits[place] + change.to(logits)
        offset = self.log_common.narrow(1, 0, 1) - self.base
        offset = offset.masked_fill(self._too_late(self.first), -torch.inf)
        logits[rows] = logits[rows] + offset.to(logits)
        logits[place] = corrected

    def forbid_ends_(self, logits: Tensor) -> None:
        """Forbid end-of-text tokens while the constraint is not satisfied: (n, V or more).

        Their logits stay finite: if every other token is -inf, a row can still end.
        """
        if self.plan.ends is None:
            return
        rows = self.automata.rows
        ends = self.plan.ends[rows.rows]  # (A, E)
        # Ends that the HMM does not know are of class 0.
        known = torch.where(ends < self.pool.hmm.vocab_size, ends, -1)
        transition = torch.where(known >= 0, self._transitions(known.clamp_min(0)), self.first)
        unsatisfied = self._min_tokens(transition) > 0
        place = (rows.rows.unsqueeze(1), ends.clamp_min(0))
        log_zero, before = log_zero_for(logits), logits[place]
        end_logits = before.masked_fill(unsatisfied, log_zero).clamp_min_(log_zero)
        logits[place] = torch.where(ends >= 0, end_logits, before)

    def _transitions(self, tokens: Tensor) -> Tensor:
        """Return the transitions of tokens in the pool: (U,) or (A, U) -> (A, U)."""
        classes = self.pool.classes.rows[self.automata.rows.classes.unsqueeze(1), tokens]
        return self.first + classes

    def _min_tokens(self, transition: Tensor) -> Tensor:
        """Return the fewest tokens that satisfy the constraint after transitions: (A, U)."""
        after = self.pool.transitions.rows[transition]
        return self.pool.min_tokens.rows[self.automata.rows.states.unsqueeze(1) + after]

    def _too_late(self, transition: Tensor) -> Tensor:
        """Return after which transitions the constraint cannot be satisfied any more: (A, U).

        This is certain, while a small EAP is not.
        """
        return self._min_tokens(transition) > self.remaining

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
        weights = self.pool.weights.rows[self.automata.column_weights, self.automata.tokens]
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
        if not any(group.transformed for group in self.plan.groups):
            return log_values
        goals = self.automata.rows.goals
        scale, shift = (part[goals].unsqueeze(1) for part in (self.plan.scale, self.plan.shift))
        log_scale = self.log_scale.gather(1, target).to(log_values)
        parameters = (part.to(log_values) for part in (scale, shift))
        transformed = log_transformed(log_values.clone(), log_scale, *parameters)[0]
        return torch.where((scale == 1.0) & (shift == 0.0), log_values, transformed)


def _targets(automata: AutomatonPlan, pool: TablePool, states: Tensor) -> Tensor:
    """Return the distinct next states of automaton states, padded with the last: (A, D)."""
    rows = automata.rows
    number = torch.arange(automata.max_targets, device=states.device)
    number = torch.minimum(number, rows.num_targets.unsqueeze(1) - 1)
    return pool.targets.rows[(rows.targets + states * rows.num_targets).unsqueeze(1) + number]


def _row_maximum(values: Tensor, index: Tensor, rows: int) -> Tensor:
    """Return the maximum over the columns of each row: (C, D), (C,) -> (rows, D)."""
    start = values.new_full((rows, values.shape[1]), LOG_ZERO)
    return start.scatter_reduce(0, index.unsqueeze(1).expand_as(values), values, "amax")


def _common(plan: Plan, automata: AutomatonPlan, log_scale: Tensor) -> Tensor:
    """Return the summand of log f(EAP) that all tokens with one target share: (A, D)."""
    if not any(group.transformed for group in plan.groups):
        return log_scale
    goals = automata.rows.goals
    scale, shift = (part[goals].unsqueeze(1) for part in (plan.scale, plan.shift))
    transformed = log_common(log_scale, scale, shift)
    return torch.where((scale == 1.0) & (shift == 0.0), log_scale, transformed)
