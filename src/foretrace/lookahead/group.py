"""Goals of one kind: their rows share a step, whatever their attributes."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretrace.attribute.transform import log_transformed
from foretrace.lookahead.expectation import Future, Kind, Weighing, expect
from foretrace.lookahead.goal import Goal
from foretrace.lookahead.row import Row


@dataclass
class Asked:
    """What rows ask of lookaheads of one kind."""

    kind: Kind
    places: list[int] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    past: list[Tensor] = field(default_factory=list)
    ahead: list[Tensor] = field(default_factory=list)

    def add(self, place: int, row: Row, goal: Goal, past: Tensor, state: Tensor | None) -> None:
        """Ask for a goal of a row; if it has an automaton, as most next tokens would move that."""
        self.places.append(place)
        self.goals.append(goal)
        if state is None:
            self.ahead.append(goal.lookahead.ahead(row.request.remaining(row.written)))
            self.past.append(past)
            return
        target = goal.lookahead.remembered.targets[state, 0]  # (1,)
        left = row.request.left(row.written)  # what must occur may do so at any time
        self.ahead.append(goal.lookahead.ahead(left, target)[:, 0])
        self.past.append(past + goal.lookahead.log_scale(left, target)[:, 0])

    def weighing(self) -> Weighing:
        """Give what the rows' attributes say of tokens."""
        own = {id(goal.lookahead.own): goal.lookahead.own for goal in self.goals}
        order = {name: place for place, name in enumerate(own)}
        which = [order[id(goal.lookahead.own)] for goal in self.goals]
        coefficients = torch.stack([goal.lookahead.coefficients for goal in self.goals], 1)
        device = coefficients.device
        return Weighing(
            coefficients,
            torch.stack(self.past, 1),
            list(own.values()),
            torch.tensor(which, device=device),
        )

    def transform(self, like: Tensor) -> tuple[Tensor, Tensor] | None:
        """Give every goal's scale and shift, (n,) each; None where nothing is transformed."""
        if self.goals[0].transform.identity:
            return None
        scale, shift = torch.tensor([(goal.strength, goal.shift) for goal in self.goals]).to(like).T
        return scale, shift


def by_kind(rows: Sequence[Row]) -> list[Asked]:
    """Group what rows ask; what is not transformed stays apart, to the last digit."""
    groups: dict[tuple[Kind, bool], Asked] = {}
    for place, row in enumerate(rows):
        for goal, past, state in zip(row.request.goals, row.past, row.states, strict=True):
            kind = goal.lookahead.kind
            asked = groups.setdefault((kind, goal.transform.identity), Asked(kind))
            asked.add(place, row, goal, past, state)
    return list(groups.values())


class Group:
    """Goals of one kind, of some of the rows: what stays the same from block to block."""

    def __init__(self, asked: Asked, states: Tensor) -> None:
        self.kind, self.places = asked.kind, asked.places
        readings = [goal.lookahead.reading for goal in asked.goals]
        self.plain = [at for at, reading in enumerate(readings) if reading is None]
        self.whole = asked.places == list(range(states.shape[1]))
        self.index = torch.tensor(asked.places, device=states.device)
        ahead = torch.stack([each.T for each in asked.ahead], -1)
        weighted = ahead * states[:, None, asked.places]  # (h, K, n)
        self.average = weighted.sum(0)
        self.weighted = weighted.flatten(1)
        self.weighing = asked.weighing()
        self.transform = asked.transform(self.average)

    def log_factors(
        self, joint: Tensor, probability: Tensor, block: slice
    ) -> tuple[Tensor, Tensor]:
        """Give log f(EAP) of every token of a block: what differs, (b, n), and is common, (n,)."""
        shaped = joint.reshape(len(joint), self.kind.terms, len(self.places))
        future = Future(shaped, probability, self.average)
        eap = expect(self.kind, future, self.weighing, block)
        if self.transform is None:
            return eap.share.log_().minimum(-eap.log_size), eap.log_size
        return log_transformed(eap.share, eap.log_size, *self.transform)
