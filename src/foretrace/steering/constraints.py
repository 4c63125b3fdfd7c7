"""Next tokens that lead an automaton elsewhere than all others: reckoned apart from them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretrace.attribute.transform import log_common, log_transformed
from foretrace.hmm import inference
from foretrace.hmm.probability import blocks_of
from foretrace.lookahead.lookahead import Lookahead
from foretrace.lookahead.tables import NEVER, never_in
from foretrace.steering.goal_group import transform_of
from foretrace.steering.state import Pursuit, Row, pursuits

MOST_ELEMENTS = 1 << 22  # numbers at once
NOTHING = 1e4  # nats: what is so much less probable will not be written
FORGOTTEN = -1e9  # the logarithm of a past that is impossible: what is added to it keeps its digits


@dataclass
class Exceptions:
    """Rows whose goals have one lookahead, and with it one automaton."""

    lookahead: Lookahead
    pursued: list[Pursuit] = field(default_factory=list)

    @property
    def places(self) -> list[int]:
        """Of the rows, among others."""
        return [each.place for each in self.pursued]

    def correct_(self, logits: Tensor) -> Tensor:
        """Give these tokens factors of their own, in place of those that all others have: (n,).

        Sizes of expectations may differ beyond float32. They are told from that of all others on,
        unless it is nothing beside the largest; what they are told from is given back.
        """
        reckoning = _Reckoning(self.lookahead, self.pursued)
        reading, states = reckoning.reading, reckoning.states
        rows = torch.tensor(self.places, device=logits.device)[:, None]
        late, too_late = self._too_late(states)
        found = []
        for block, own, others in reckoning.blocks():  # (n, m) each
            tokens = reading.tokens[block].to(logits.device)
            change = (own - others).masked_fill(too_late[:, block], -torch.inf)
            found.append((tokens, logits[rows, tokens] + change.to(logits)))
        shrunk = (reckoning.common - reckoning.base).masked_fill(late, -torch.inf)
        self._shrink_(logits, shrunk.to(logits))
        for tokens, steered in found:
            logits[rows, tokens] = steered
        self._forbid_ends_(logits, rows, states)
        return reckoning.base

    def _shrink_(self, logits: Tensor, by: Tensor) -> None:
        """Make all tokens of rows less probable: (n,) is added; on CPUs, where it is not 0."""
        if logits.device.type == "cpu":
            for place, much in zip(self.places, by.tolist(), strict=True):
                if much:
                    logits[place] += much
        else:
            logits[self.places] += by[:, None]

    def _too_late(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Tell after which tokens there is no room for a worthy end: all others (n,), these (n, M).

        This is certain; that the HMM thinks it improbable is not.
        """
        reading = self.lookahead.remembered
        room = torch.tensor([each.left for each in self.pursued], device=states.device)
        fewest = reading.fewest[reading.moves[states]]  # (n, C)
        return fewest[:, 0] > room, fewest[:, reading.classes] > room[:, None]

    def _forbid_ends_(self, logits: Tensor, rows: Tensor, states: Tensor) -> None:
        """Let no text end before it may, unless there is nothing else that it can do."""
        known = [each.row.request.ends for each in self.pursued]
        width = max(map(len, known))
        if not width:
            return
        padded = [[*own, *own[:1] * (width - len(own))] for own in known]
        ends = torch.tensor(padded, device=logits.device)
        reading = self.lookahead.remembered
        after = reading.after(states[:, None], ends.to(states.device))
        unfinished = (reading.fewest[after] > 0).to(logits.device)
        never = never_in(logits)
        logits[rows, ends] = logits[rows, ends].masked_fill(unfinished, never).clamp_min_(never)


class _Reckoning:
    """EAP of an automaton's tokens, for the targets that they lead to, and as if for class 0's."""

    def __init__(self, lookahead: Lookahead, pursued: Sequence[Pursuit]) -> None:
        self.lookahead, self.reading = lookahead, lookahead.remembered
        self.states = torch.cat([each.state for each in pursued if each.state is not None])  # (n,)
        targets = self.reading.targets[self.states]  # (n, D)
        sought = [(each.left, own) for each, own in zip(pursued, targets, strict=True)]
        chosen = [lookahead.ahead(*each) for each in sought]
        scales = [lookahead.log_scale(*each) for each in sought]
        predicted = torch.stack([each.row.predicted for each in pursued])  # (n, h)
        weighted = torch.stack(chosen) * predicted[:, None, None]  # (n, K, D, h)
        self.average = weighted.sum(-1)  # (n, K, D)
        self.beliefs = torch.cat([predicted, weighted.flatten(0, 2)]).T  # (h, n (1 + K D))
        past = torch.stack([each.past for each in pursued]).clamp_min(FORGOTTEN).unsqueeze(-1)
        sizes = (past + torch.stack(scales)).clamp_min(NEVER)  # (n, K, D) float64
        self.size = sizes.amax(1)  # (n, D)
        coefficients = lookahead.coefficients[:, None]
        self.shares = (coefficients * (sizes - self.size[:, None]).exp()).to(predicted)
        # (n, 1) each: to all targets of a row
        found = transform_of([each.goal for each in pursued], self.size)
        self.transform = None if found is None else [part.unsqueeze(-1) for part in found]
        self.sums = self.size  # (n, D): what is common to all tokens of a target
        if self.transform is not None:
            self.sums = log_common(self.size, *self.transform)
        self.common = self.sums[:, 0]
        self.base = torch.maximum(self.common, self.sums.amax(1) - NOTHING)

    def blocks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Give log f(EAP), less what is common, some tokens at a time: their own, and others'."""
        count, column = len(self.states), self.reading.column[self.states]  # (n, C)
        width = max(1, MOST_ELEMENTS // self.beliefs.shape[1])
        for block in blocks_of(len(self.reading.tokens), width):
            product = self.reading.emission.rows(block).predict(self.beliefs)  # (m, n (1 + K D))
            joint = product[:, count:].reshape(-1, *self.average.shape)  # (m, n, K, D)
            given = joint.permute(1, 2, 3, 0), product[:, :count].T, block  # tokens last
            own = column[:, self.reading.classes[block]]  # (n, m)
            changed = self.sums.gather(1, own) - self.base[:, None]
            factors, others = (self._log_factors(*given, each) for each in (own, 0 * own))
            yield block, factors + changed.to(factors), others

    def _log_factors(
        self, joint: Tensor, probability: Tensor, block: slice, column: Tensor
    ) -> Tensor:
        """Give log f(EAP) of tokens, each for the target in its column, less what is common to it.

        (n, K, D, m), (n, m), a block of m tokens, (n, m) -> (n, m).
        """
        least = inference.IMPOSSIBLE
        place = column.unsqueeze(1).expand(-1, joint.shape[1], -1)  # (n, K, m)
        ratio = joint.gather(2, place.unsqueeze(2))[:, :, 0]
        ratio = ratio.add_(self.average.gather(2, place), alpha=least)
        ratio.div_((probability + least).unsqueeze(1))
        ratio.mul_(self.lookahead.own[:, self.reading.tokens[block]])
        share = ratio.mul_(self.shares.gather(2, place)).sum(1).clamp_min_(least)
        size = self.size.gather(1, column).to(share)
        if self.transform is None:
            return share.log_().minimum(-size)
        return log_transformed(share, size, *(part.to(share) for part in self.transform))[0]


def exceptions(rows: Sequence[tuple[int, Row]]) -> list[Exceptions]:
    """Find the goals of rows that have automata; what is not transformed stays apart."""
    found: dict[tuple[int, bool], Exceptions] = {}
    for each in pursuits(rows):
        if each.state is not None:
            key = (id(each.goal.lookahead), each.goal.transform.identity)
            found.setdefault(key, Exceptions(each.goal.lookahead)).pursued.append(each)
    return list(found.values())
