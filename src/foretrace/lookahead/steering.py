"""Steering a batch of texts while they are written: the only thing here that changes.

What it keeps is a cache: everything can be found again from the token ids. Tokens and states stay
on the HMM's device, and nothing here waits for it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretrace.attribute.transform import logit_affine_of_log
from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM, inference
from foretrace.lookahead.expectation import Future, Kind, Weighing, expected, log_eap
from foretrace.lookahead.goal import Goal
from foretrace.lookahead.lookahead import Lookahead

# Probabilities at once. On a CPU what fits its caches: twice as fast with hundreds of rows.
MOST_ELEMENTS, MOST_ON_CPU = 1 << 26, 1 << 20
READ_BACK = 512  # tokens that are read of a text when it is met: an HMM forgets those before


@dataclass(frozen=True, eq=False)
class Request:
    """What is asked for a row; the same object at every step."""

    goals: tuple[Goal, ...]
    """Their factors multiply; a row without goals is left as it is."""
    prompt: tuple[int, ...]
    limit: int
    """Tokens to write at most: what remains of them is looked ahead at, up to the horizon."""
    horizon: int | None = None
    """Look no further ahead than this."""

    def remaining(self, written: int) -> int:
        """How many tokens may follow the next one, as far as is looked."""
        left = max(0, self.limit - written - 1)
        return left if self.horizon is None else min(left, self.horizon)


@dataclass(frozen=True, eq=False)
class Row:
    """A text and its state."""

    request: Request
    written: int
    """How many tokens."""
    predicted: Tensor  # (h,): p(z of the next token | prompt and written)
    past: tuple[Tensor, ...]  # of each goal: (K,) sums of log-weights, float64


class Steering:
    """Rows of texts: what they may become, given what they are."""

    def __init__(self, hmm: HMM, observe: Callable[[Tensor], None] | None = None) -> None:
        """`observe` is told the EAP of texts that are steered, as they are: (n,) on the device."""
        self.hmm, self.observe = hmm, observe
        self._ends = torch.tensor(hmm.config.eos_token_ids, dtype=torch.long, device=hmm.device)

    def advance(self, rows: Sequence[Row], tokens: Tensor) -> list[Row]:
        """Take one more token of each row into account: (n,) ids."""
        if not rows:
            return []
        predicted = torch.stack([row.predicted for row in rows])
        advanced = inference.step(self.hmm, predicted, tokens).predicted
        weighed = _log_weights([row.request for row in rows], tokens)
        return [
            Row(row.request, row.written + 1, state, _added(row.past, own))
            for row, state, own in zip(rows, advanced, weighed, strict=True)
        ]

    def read(
        self, requests: Sequence[Request], tokens: Tensor, prompts: Tensor, lengths: Tensor
    ) -> list[Row]:
        """Find the states of texts from nothing but their tokens.

        (n, T) ids; of each row, the length of its prompt, and that with what is written: (n,) on
        the host. What comes before the last end of text in a prompt is another text.
        """
        if not requests:
            return []
        device = self.hmm.device
        starts = (lengths - READ_BACK).clamp_min(0)
        width = int((lengths - starts).max())
        place = starts[:, None] + torch.arange(width)  # on the host
        in_text, in_prompt = place < lengths[:, None], place < prompts[:, None]
        near = tokens.gather(1, place.clamp_max(tokens.shape[1] - 1).to(tokens.device)).to(device)
        ended = torch.isin(near, self._ends) & in_prompt.to(device)
        over = ended.flip(1).cumsum(1).flip(1) > 0  # here or later a text ends
        mask = in_text.to(device) & ~over
        predicted = self.hmm.initial.expand(len(requests), -1)
        for filtered in inference.scan(self.hmm, near, mask):
            predicted = filtered.predicted
        past = self._past(requests, tokens, prompts, lengths)
        counts = (lengths - prompts).tolist()
        return [
            Row(request, *each)
            for request, *each in zip(requests, counts, predicted, past, strict=True)
        ]

    def _past(
        self, requests: Sequence[Request], tokens: Tensor, prompts: Tensor, lengths: Tensor
    ) -> list[tuple[Tensor, ...]]:
        """Sum the log-weights of what is written, of each row's goals."""
        found = []
        bounds = zip(prompts.tolist(), lengths.tolist(), strict=True)
        for request, row, (first, last) in zip(requests, tokens, bounds, strict=True):
            written = row[first:last].to(self.hmm.device)
            found.append(tuple(g.lookahead.log_weights(written).sum(0) for g in request.goals))
        return found

    def reweight(self, logits: Tensor, rows: Sequence[Row | None]) -> Tensor:
        """Add the logarithms of the factors to the LM's logits: (n, V or more) -> the same.

        What the HMM does not know, past its vocabulary, a steered row will not write. A row that is
        None, or has no goals, is left as it is.
        """
        if len(logits) != len(rows) or logits.shape[1] < self.hmm.vocab_size:
            raise InvalidInputError(
                f"Logits have shape {tuple(logits.shape)}, but there are {len(rows)} rows, "
                f"and the HMM knows {self.hmm.vocab_size} tokens. Is it the HMM of this LM?"
            )
        steered = logits.clone()
        known = steered[:, : self.hmm.vocab_size]
        for part in self._parts(rows):
            factors = self._log_factors([row for _, row in part]).to(logits)
            places = torch.tensor([place for place, _ in part], device=logits.device)
            known.index_add_(0, places, factors)
            steered[places, self.hmm.vocab_size :] = -torch.inf
        return steered

    def _parts(self, rows: Sequence[Row | None]) -> Iterator[list[tuple[int, Row]]]:
        """Go through the rows that have goals, as many at once as memory should hold."""
        most = MOST_ON_CPU if self.hmm.device.type == "cpu" else MOST_ELEMENTS
        part: list[tuple[int, Row]] = []
        width = 0
        for place, row in enumerate(rows):
            if row is None or not row.request.goals:
                continue
            own = 1 + sum(len(goal.lookahead.terms) for goal in row.request.goals)
            if part and (width + own) * self.hmm.vocab_size > most:
                yield part
                part, width = [], 0
            part.append((place, row))
            width += own
        if part:
            yield part

    def _log_factors(self, rows: Sequence[Row]) -> Tensor:
        """Give the sum of log f(EAP) over each row's goals, of every next token: (n, V)."""
        predicted = torch.stack([row.predicted for row in rows])  # (n, h)
        groups = _by_kind(rows)
        weighted = [predicted[asked.places].unsqueeze(1) * asked.ahead() for asked in groups]
        # One product for all: the emission is read once.
        stacked = torch.cat([predicted, *(each.flatten(0, 1) for each in weighted)])
        sizes = [len(rows), *(each.shape[0] * each.shape[1] for each in weighted)]
        probability, *joints = torch.split(self.hmm.emission.predict(stacked), sizes)
        total: Tensor | None = None
        for asked, joint, each in zip(groups, joints, weighted, strict=True):
            whole = asked.places == list(range(len(rows)))
            own = probability if whole else probability[asked.places]
            shaped = joint.view(len(asked.places), -1, joint.shape[-1])
            future, weighing = Future(shaped, own, each.sum(-1)), asked.weighing()
            if self.observe is not None:
                self.observe(expected(asked.kind, future.average, weighing))
            ends = self.hmm.config.eos_token_ids
            factors = asked.transformed(log_eap(asked.kind, future, weighing, ends))
            if whole and total is None:
                total = factors  # one kind for all: nothing to add up
            else:
                total = torch.zeros_like(probability) if total is None else total
                total.index_add_(0, torch.tensor(asked.places, device=factors.device), factors)
        assert total is not None  # every row here has a goal
        return total


@dataclass
class _Asked:
    """What rows ask of lookaheads of one kind."""

    kind: Kind
    places: list[int] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    past: list[Tensor] = field(default_factory=list)
    left: list[int] = field(default_factory=list)

    def ahead(self) -> Tensor:
        """Give every row's table for what remains to it: (n, K, h)."""
        pairs = zip(self.goals, self.left, strict=True)
        return torch.stack([goal.lookahead.ahead(left) for goal, left in pairs])

    def weighing(self) -> Weighing:
        """Give what the rows' attributes say of tokens."""
        return Weighing(
            _stacked(goal.lookahead.coefficients for goal in self.goals),
            torch.stack(self.past),
            _stacked(goal.lookahead.own for goal in self.goals),
        )

    def transformed(self, log_eap: Tensor) -> Tensor:
        """Give log f(EAP), f being each goal's own: (n, V)."""
        first = self.goals[0].transform
        if all(goal.transform == first for goal in self.goals):
            return first.of_log(log_eap)
        given = [(goal.strength, goal.shift) for goal in self.goals]
        scale, shift = torch.tensor(given).to(log_eap).T.unsqueeze(-1)
        return logit_affine_of_log(log_eap, scale, shift)


def _by_kind(rows: Sequence[Row]) -> list[_Asked]:
    """Group what rows ask; what is not transformed stays apart, to the last digit."""
    groups: dict[tuple[Kind, bool], _Asked] = {}
    for place, row in enumerate(rows):
        for goal, past in zip(row.request.goals, row.past, strict=True):
            kind = goal.lookahead.kind
            asked = groups.setdefault((kind, goal.transform.identity), _Asked(kind))
            asked.places.append(place)
            asked.goals.append(goal)
            asked.past.append(past)
            asked.left.append(row.request.remaining(row.written))
    return list(groups.values())


def _log_weights(requests: Sequence[Request], tokens: Tensor) -> list[tuple[Tensor, ...]]:
    """Give the log-weights of each row's token, for each of its goals: of each (K,)."""
    places: dict[Lookahead, list[int]] = {}
    for place, request in enumerate(requests):
        for goal in request.goals:
            places.setdefault(goal.lookahead, []).append(place)
    found = {
        (lookahead, place): own
        for lookahead, rows in places.items()
        for place, own in zip(rows, lookahead.log_weights(tokens[rows]), strict=True)
    }
    return [
        tuple(found[goal.lookahead, place] for goal in request.goals)
        for place, request in enumerate(requests)
    ]


def _added(past: tuple[Tensor, ...], own: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(before + more for before, more in zip(past, own, strict=True))


def _stacked(tensors: Iterable[Tensor]) -> Tensor:
    """Stack rows; one that is the same for all is not copied."""
    rows = list(tensors)
    if all(row is rows[0] for row in rows):
        return rows[0].expand(len(rows), *rows[0].shape)
    return torch.stack(rows)
