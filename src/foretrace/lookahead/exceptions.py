"""Next tokens that lead an automaton elsewhere than all others: few, and so reckoned apart."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretrace.lookahead.goal import Goal
from foretrace.lookahead.group import Asked, Group
from foretrace.lookahead.reading import Reading
from foretrace.lookahead.row import Row
from foretrace.lookahead.tables import NEVER


@dataclass
class Exceptions:
    """Rows whose goals have one lookahead, and with it one automaton."""

    reading: Reading
    places: list[int] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    past: list[Tensor] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)

    def correct_(self, logits: Tensor, *, absolute: bool) -> None:
        """Give these tokens their own factors, in place of those that all others have."""
        reading, states = self.reading, torch.stack(self.states)  # (n,)
        factors, common = self._factors(states)  # (M, n, D), (n, D)
        # Sizes may differ beyond float32: they are told from the largest on.
        size = common[:, 0] if absolute else common.max(1).values
        column = reading.column[states][:, reading.classes].T.unsqueeze(-1)  # (M, n, 1)
        own = (factors + (common - size[:, None])).gather(2, column)[..., 0]
        rows = torch.tensor(self.places, device=logits.device)[:, None]
        tokens = reading.tokens.to(logits.device)
        late, too_late = self._too_late(states)
        change = (own - factors[..., 0]).T.masked_fill(too_late, -torch.inf)
        exceptional = logits[rows, tokens] + change.to(logits)
        others = (common[:, 0] - size).masked_fill(late, -torch.inf)
        logits[rows[:, 0]] += others[:, None].to(logits)
        logits[rows, tokens] = exceptional
        self._forbid_ends_(logits, rows, states)

    def _too_late(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Tell after which tokens there is no room for a worthy end: all others (n,), these (n, M).

        This is certain; that the HMM thinks it improbable is not.
        """
        left = [row.request.left(row.written) for row in self.rows]
        room = torch.tensor(left, device=states.device)
        fewest, moves = self.reading.fewest, self.reading.moves[states]
        return fewest[moves[:, 0]] > room, fewest[moves[:, self.reading.classes]] > room[:, None]

    def _forbid_ends_(self, logits: Tensor, rows: Tensor, states: Tensor) -> None:
        """Let no text end before it may, unless there is nothing else that it can do."""
        known = [row.request.ends for row in self.rows]
        width = max(map(len, known))
        if not width:
            return
        padded = [[*own, *own[:1] * (width - len(own))] for own in known]
        ends = torch.tensor(padded, device=logits.device)
        after = self.reading.after(states[:, None], ends.to(states.device))
        unfinished = (self.reading.fewest[after] > 0).to(logits.device)
        logits[rows, ends] = logits[rows, ends].masked_fill(unfinished, NEVER).clamp_min_(NEVER)

    def _factors(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Give log f(EAP) of these tokens as if they led to each of the targets, in float64."""
        predicted = torch.stack([row.predicted for row in self.rows], 1)  # (h, n)
        asked = Asked(self.goals[0].lookahead.kind)
        for place, (row, goal, past) in enumerate(
            zip(self.rows, self.goals, self.past, strict=True)
        ):
            for target in self.reading.targets[states[place]]:
                asked.add(place, goal, past, row.request.remaining(row.written), target)
        group = Group(asked, predicted)
        product = self.reading.emission.predict(torch.cat([predicted, group.weighted], 1))
        probability = product[:, asked.places]
        joint = product[:, len(self.rows) :]
        factors, common = group.log_factors(joint, probability, self.reading.tokens)
        shape = (len(self.rows), self.reading.targets.shape[1])
        return factors.double().reshape(-1, *shape), common.double().reshape(shape)


def exceptions(rows: Sequence[tuple[int, Row]]) -> list[Exceptions]:
    """Find the goals of rows that have automata; what is not transformed stays apart."""
    found: dict[tuple[int, bool], Exceptions] = {}
    for place, row in rows:
        for goal, past, state in zip(row.request.goals, row.past, row.states, strict=True):
            reading = goal.lookahead.reading
            if reading is None or state is None:
                continue
            key = (id(goal.lookahead), goal.transform.identity)
            own = found.setdefault(key, Exceptions(reading))
            own.places.append(place)
            own.rows.append(row)
            own.goals.append(goal)
            own.past.append(past)
            own.states.append(state)
    return list(found.values())
