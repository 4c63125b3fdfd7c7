"""Goals of one kind: their rows share a step, whatever their attributes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from foretrace.attribute.transform import log_common, log_transformed
from foretrace.lookahead.eap import Future, Kind, Weighing, expect
from foretrace.steering.goal import Goal
from foretrace.steering.state import Pursuit, Row, pursuits


def by_kind(rows: Sequence[Row]) -> list[list[Pursuit]]:
    """Group what rows pursue; what is not transformed stays apart, to the last digit."""
    groups: dict[tuple[Kind, bool], list[Pursuit]] = {}
    for each in pursuits(enumerate(rows)):
        key = (each.goal.lookahead.kind, each.goal.transform.identity)
        groups.setdefault(key, []).append(each)
    return list(groups.values())


class Group:
    """Goals of one kind, of some of the rows: what stays the same from block to block."""

    def __init__(self, pursued: Sequence[Pursuit], states: Tensor) -> None:
        self.kind = pursued[0].goal.lookahead.kind
        self.places = [each.place for each in pursued]
        self.plain = [at for at, each in enumerate(pursued) if each.state is None]
        self.whole = self.places == list(range(states.shape[1]))
        self.index = torch.tensor(self.places, device=states.device)
        ahead, past = zip(*map(_ahead, pursued), strict=True)
        tables = torch.stack([each.T for each in ahead], -1)
        weighted = tables * states[:, None, self.places]  # (h, K, n)
        self.average = weighted.sum(0)
        self.weighted = weighted.flatten(1)
        goals = [each.goal for each in pursued]
        self.weighing = _weighing(goals, torch.stack(past, 1))
        self.transform = transform_of(goals, self.average)

    def log_factors(self, joint: Tensor, probability: Tensor, block: slice) -> Tensor:
        """Give log f(EAP) of every token of a block, less what is common to all: (b, n)."""
        shaped = joint.reshape(len(joint), self.kind.terms, len(self.places))
        future = Future(shaped, probability, self.average)
        eap = expect(self.kind, future, self.weighing, block)
        if self.transform is None:
            return eap.share.log_().minimum(-eap.log_size)
        return log_transformed(eap.share, eap.log_size, *self.transform)[0]

    @property
    def common(self) -> Tensor:
        """What is common to all tokens: (n,)."""
        size = self.weighing.log_size.to(self.average)
        return size if self.transform is None else log_common(size, *self.transform)


def transform_of(goals: Sequence[Goal], like: Tensor) -> tuple[Tensor, Tensor] | None:
    """Give every goal's scale and shift, (n,) each; None where nothing is transformed."""
    if goals[0].transform.identity:
        return None
    scale, shift = torch.tensor([(goal.strength, goal.shift) for goal in goals]).to(like).T
    return scale, shift


def _ahead(pursued: Pursuit) -> tuple[Tensor, Tensor]:
    """Give a goal's table for what remains, (K, h), and its past, (K,).

    If it has an automaton, as most next tokens would move that; what must occur may do so at any
    time, so that all that remains is looked at.
    """
    lookahead, row = pursued.goal.lookahead, pursued.row
    if pursued.state is None:
        return lookahead.ahead(row.request.remaining(row.written)), pursued.past
    target = lookahead.remembered.targets[pursued.state, 0]  # (1,)
    scale = lookahead.log_scale(pursued.left, target)[:, 0]
    return lookahead.ahead(pursued.left, target)[:, 0], pursued.past + scale


def _weighing(goals: Sequence[Goal], past: Tensor) -> Weighing:
    """Give what goals' attributes say of tokens: (K, n) sums of log-weights of what is written."""
    own = {id(goal.lookahead.own): goal.lookahead.own for goal in goals}
    order = {name: place for place, name in enumerate(own)}
    which = [order[id(goal.lookahead.own)] for goal in goals]
    coefficients = torch.stack([goal.lookahead.coefficients for goal in goals], 1)
    chosen = torch.tensor(which, device=coefficients.device)
    return Weighing(coefficients, past, list(own.values()), chosen)
