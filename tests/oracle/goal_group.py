"""Goals of one kind, whose factors are computed together even if their attributes differ."""

from collections.abc import Sequence

import torch
from torch import Tensor

from foretrace.attribute.transform import log_common, log_transformed
from foretrace.lookahead.eap import EapKind, NextTokenJoint, TermWeights, compute_eap
from foretrace.steering.goal import Goal
from foretrace.steering.transfer import to_device
from oracle.state import GoalState, SequenceState, goal_states


def group_by_kind(sequences: Sequence[SequenceState]) -> list[list[GoalState]]:
    """Group the goals of sequences by kind.

    Goals without a transform form their own groups: their factors are exact to the last digit.
    """
    groups: dict[tuple[EapKind, bool], list[GoalState]] = {}
    for state in goal_states(enumerate(sequences)):
        key = (state.goal.lookahead.kind, state.goal.transform.is_identity)
        groups.setdefault(key, []).append(state)
    return list(groups.values())


class GoalGroup:
    """Goals of one kind: the values that all blocks of the vocabulary share."""

    def __init__(self, states: Sequence[GoalState], predicted: Tensor) -> None:
        """Take the goals' states, and the predicted HMM states of all steered rows: (h, n)."""
        self.kind = states[0].goal.lookahead.kind
        self.rows = [state.row for state in states]
        self.unconstrained = [
            column for column, state in enumerate(states) if state.automaton_state is None
        ]
        self.covers_all_rows = self.rows == list(range(predicted.shape[1]))
        self.row_index = to_device(self.rows, predicted.device)
        tables, log_pasts = zip(*map(_table_and_log_past, states), strict=True)
        stacked = torch.stack([table.T for table in tables], -1)
        weighted = stacked * predicted[:, None, self.row_index]  # (h, K, n)
        self.average = weighted.sum(0)
        self.weighted = weighted.flatten(1)
        goals = [state.goal for state in states]
        self.weights = _term_weights(goals, torch.stack(log_pasts, 1))
        self.transform = transform_tensors(goals, self.average)

    def log_factors(self, joint: Tensor, probability: Tensor, block: slice) -> Tensor:
        """Compute log f(EAP) of every token of a block, less `log_common`: (b, n)."""
        joint = joint.reshape(len(joint), self.kind.num_terms, len(self.rows))
        next_token = NextTokenJoint(joint, probability, self.average)
        eap = compute_eap(self.kind, next_token, self.weights, block)
        if self.transform is None:
            return eap.values
        return log_transformed(eap.values, eap.log_scale, *self.transform)[0]

    @property
    def log_common(self) -> Tensor:
        """Return the summand of log f(EAP) that all tokens share: (n,)."""
        log_scale = self.weights.log_scale.to(self.average)
        return log_scale if self.transform is None else log_common(log_scale, *self.transform)


def transform_tensors(goals: Sequence[Goal], like: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return every goal's scale and shift, (n,) each; None if the goals have no transform."""
    if goals[0].transform.is_identity:
        return None
    parameters = torch.tensor([(goal.transform.scale, goal.transform.shift) for goal in goals])
    scale, shift = parameters.to(like, non_blocking=True).T
    return scale, shift


def _table_and_log_past(state: GoalState) -> tuple[Tensor, Tensor]:
    """Return a goal's table for the remaining tokens, (K, h), and its log-past, (K,).

    With an automaton, the table is that of the default transition. The request's horizon does not
    apply to it: a constraint may be satisfied at any time before the end.
    """
    lookahead, sequence = state.goal.lookahead, state.sequence
    if lookahead.automaton is None:
        remaining = sequence.request.tokens_ahead(sequence.num_generated, sequence.window.end)
        log_scale = lookahead.log_scale_for(remaining)
        return lookahead.table_for(remaining), state.log_past + log_scale
    target = lookahead.automaton.targets[state.automaton_state, 0]  # (1,)
    remaining = state.tokens_after_next
    log_scale = lookahead.log_scale_for(remaining, target)[:, 0]
    return lookahead.table_for(remaining, target)[:, 0], state.log_past + log_scale


def _term_weights(goals: Sequence[Goal], log_past: Tensor) -> TermWeights:
    """Collect the goals' coefficients and token weights; `log_past` is (K, n)."""
    distinct = {id(goal.lookahead): goal.lookahead for goal in goals}
    position = {key: index for index, key in enumerate(distinct)}
    coefficients = torch.stack([goal.lookahead.coefficients for goal in goals], 1)
    index = [position[id(goal.lookahead)] for goal in goals]
    return TermWeights(
        coefficients,
        log_past,
        [lookahead.token_weights for lookahead in distinct.values()],
        to_device(index, coefficients.device),
    )
