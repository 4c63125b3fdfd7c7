"""Steering a batch of texts while they are written: the only thing here that changes.

What it keeps is a cache. Everything can be found again from the token ids: a row whose text is not
that of the step before with one token more is matched to another row's, or filtered anew.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM, inference
from foretrace.lookahead.goal import Goal
from foretrace.lookahead.lookahead import Lookahead

# Probabilities at once. On a CPU what fits its caches: twice as fast with hundreds of rows.
MOST_ELEMENTS, MOST_ON_CPU = 1 << 26, 1 << 20


@dataclass(frozen=True, eq=False)
class Request:
    """What is asked for a row; the same object at every step."""

    goals: tuple[Goal, ...]
    """Their factors multiply; a row without goals is left as it is."""
    prompt: tuple[int, ...]
    limit: int
    """Tokens to write at most: what remains of them is looked ahead at, up to the horizon."""


@dataclass(eq=False)
class _Row:
    """A text and its state; not changed any more once that is found."""

    request: Request
    written: tuple[int, ...]
    predicted: Tensor = field(init=False)  # (h,): p(z of the next token | prompt and written)
    past: tuple[Tensor, ...] = field(init=False)  # of each goal: (K,) sums of log-weights, float64

    @property
    def remaining(self) -> int:
        """How many tokens may follow the next one."""
        return max(0, self.request.limit - len(self.written) - 1)


def since_last_end(prompt: Sequence[int], ends: Sequence[int]) -> Sequence[int]:
    """Give what follows the last end of text in a prompt.

    Many LMs are prompted with that token first. To the HMM it says that all is over.
    """
    last = max((place for place, token in enumerate(prompt, 1) if token in ends), default=0)
    return prompt[last:]


class Steering:
    """The rows of a batch: what they may become, given what they are."""

    def __init__(self, hmm: HMM) -> None:
        self.hmm = hmm
        self._rows: list[_Row] = []

    def step(self, requests: Sequence[Request], written: Sequence[Sequence[int]]) -> None:
        """Take in what each row is now; rows may have come, gone, changed or changed places."""
        known = {(id(row.request), row.written): row for row in self._rows}
        rows, moved, new = [], [], []
        for request, tokens in zip(requests, written, strict=True):
            text = tuple(tokens)
            row = known.get((id(request), text))
            if row is None:
                row = _Row(request, text)
                before = known.get((id(request), text[:-1])) if text else None
                if request.goals and before is not None:
                    moved.append((before, row))
                elif request.goals:
                    new.append(row)
            rows.append(row)
        self._rows = rows
        self._advance(moved)
        self._filter(new)

    def _advance(self, moved: list[tuple[_Row, _Row]]) -> None:
        """Take one more token into account."""
        if not moved:
            return
        predicted = torch.stack([before.predicted for before, _ in moved])
        tokens = torch.tensor([row.written[-1] for _, row in moved], device=self.hmm.device)
        advanced = inference.step(self.hmm, predicted, tokens).predicted
        for (before, row), state in zip(moved, advanced, strict=True):
            row.predicted = state
            row.past = tuple(
                goal.lookahead.weighed(past, row.written[-1])
                for goal, past in zip(row.request.goals, before.past, strict=True)
            )

    def _filter(self, rows: list[_Row]) -> None:
        """Find the states of texts from nothing but their tokens."""
        if not rows:
            return
        texts = [torch.tensor(self._text(row)).long() for row in rows]
        tokens = pad_sequence(texts, batch_first=True).to(self.hmm.device)
        lengths = torch.tensor([len(text) for text in texts], device=self.hmm.device)
        mask = torch.arange(tokens.shape[1], device=self.hmm.device) < lengths[:, None]
        predicted = self.hmm.initial.expand(len(rows), -1)
        for filtered in inference.scan(self.hmm, tokens, mask):
            predicted = filtered.predicted
        for row, state in zip(rows, predicted, strict=True):
            row.predicted = state
            row.past = tuple(goal.lookahead.past(row.written) for goal in row.request.goals)

    def _text(self, row: _Row) -> list[int]:
        """Give the text that a row is part of."""
        prompt = since_last_end(row.request.prompt, self.hmm.config.eos_token_ids)
        return [*prompt, *row.written]

    def reweight(self, logits: Tensor) -> Tensor:
        """Add the logarithms of the factors to the LM's logits: (n, V or more) -> the same.

        What the HMM does not know, past its vocabulary, a steered row will not write.
        """
        if len(logits) != len(self._rows) or logits.shape[1] < self.hmm.vocab_size:
            raise InvalidInputError(
                f"Logits have shape {tuple(logits.shape)}, but there are {len(self._rows)} rows, "
                f"and the HMM knows {self.hmm.vocab_size} tokens. Is it the HMM of this LM?"
            )
        steered = logits.clone()
        known = steered[:, : self.hmm.vocab_size]
        for places in self._parts():
            factors = self._log_factors([self._rows[place] for place in places]).to(logits)
            rows = torch.tensor(places, device=logits.device)
            known.index_add_(0, rows, factors)
            steered[rows, self.hmm.vocab_size :] = -torch.inf
        return steered

    def _parts(self) -> Iterator[list[int]]:
        """Go through the rows that have goals, as many at once as memory should hold."""
        most = MOST_ON_CPU if self.hmm.device.type == "cpu" else MOST_ELEMENTS
        part: list[int] = []
        width = 0
        for place, row in enumerate(self._rows):
            own = 1 + sum(len(goal.lookahead.terms) for goal in row.request.goals)
            if part and (width + own) * self.hmm.vocab_size > most:
                yield part
                part, width = [], 0
            if row.request.goals:
                part.append(place)
                width += own
        if part:
            yield part

    def _log_factors(self, rows: list[_Row]) -> Tensor:
        """Give the sum of log f(EAP) over each row's goals, of every next token: (n, V)."""
        predicted = torch.stack([row.predicted for row in rows])  # (n, h)
        groups = _by_lookahead(rows)
        weighted = [
            predicted[asked.places].unsqueeze(1) * lookahead.ahead(asked.remaining)
            for lookahead, asked in groups.items()
        ]
        # One product for all: the emission is read once.
        stacked = torch.cat([predicted, *(each.flatten(0, 1) for each in weighted)])
        sizes = [len(rows), *(each.shape[0] * each.shape[1] for each in weighted)]
        probability, *joints = torch.split(self.hmm.emission.predict(stacked), sizes)
        total: Tensor | None = None
        for (lookahead, asked), joint, each in zip(groups.items(), joints, weighted, strict=True):
            shaped = joint.view(len(asked.places), -1, joint.shape[-1])
            whole = asked.places == list(range(len(rows)))
            own = probability if whole else probability[asked.places]
            log_eap = lookahead.log_eap(shaped, own, each.sum(-1), torch.stack(asked.past))
            factors = asked.transformed(log_eap)
            if whole and total is None:
                total = factors  # one attribute for all: nothing to add up
            else:
                total = torch.zeros_like(probability) if total is None else total
                total.index_add_(0, torch.tensor(asked.places, device=factors.device), factors)
        assert total is not None  # every row here has a goal
        return total


@dataclass
class _Asked:
    """What rows ask of one lookahead."""

    places: list[int] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    past: list[Tensor] = field(default_factory=list)
    left: list[int] = field(default_factory=list)

    @property
    def remaining(self) -> Tensor:
        """Tokens that may follow the next one, of each row."""
        return torch.tensor(self.left)

    def transformed(self, log_eap: Tensor) -> Tensor:
        """Give log f(EAP), f being each goal's own: (n, V)."""
        transforms = {goal.transform for goal in self.goals}
        if len(transforms) == 1:
            return transforms.pop().of_log(log_eap)
        return torch.stack(
            [goal.transform.of_log(one) for goal, one in zip(self.goals, log_eap, strict=True)]
        )


def _by_lookahead(rows: list[_Row]) -> dict[Lookahead, _Asked]:
    groups: dict[Lookahead, _Asked] = {}
    for place, row in enumerate(rows):
        for goal, past in zip(row.request.goals, row.past, strict=True):
            asked = groups.setdefault(goal.lookahead, _Asked())
            asked.places.append(place)
            asked.goals.append(goal)
            asked.past.append(past)
            asked.left.append(row.remaining)
    return groups
