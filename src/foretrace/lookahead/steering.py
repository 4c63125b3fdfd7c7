"""Steering a batch of texts while they are written: the only thing here that changes.

What it keeps is a cache: everything can be found again from the token ids. Tokens and states stay
on the HMM's device, and nothing here waits for it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from foretrace.attribute.transform import log_transformed
from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM, inference
from foretrace.hmm.sparse import transposed
from foretrace.lookahead.expectation import Future, Kind, Weighing, expect, expected
from foretrace.lookahead.goal import Goal
from foretrace.lookahead.lookahead import Lookahead

# Probabilities at once; on a CPU, what fits its caches. The vocabulary is cut into blocks.
MOST_ELEMENTS, MOST_ON_CPU, FEWEST_TOKENS = 1 << 25, 1 << 19, 1024
READ_BACK = 128  # tokens that are read of a text when it is met: an HMM forgets those before


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

    def __init__(
        self,
        hmm: HMM,
        observe: Callable[[Tensor], None] | None = None,
        *,
        absolute: bool = False,
    ) -> None:
        """`observe` is told the EAP of texts that are steered, as they are: (n,) on the device.

        What is common to all next tokens makes no difference to their probabilities, and is left
        out: it grows with the text, until float32 could not hold the LM's logits beside it. With
        `absolute` it is added.
        """
        self.hmm, self.observe, self.absolute = hmm, observe, absolute
        self._ends = torch.tensor(hmm.config.eos_token_ids, dtype=torch.long, device=hmm.device)

    def advance(self, rows: Sequence[Row], tokens: Tensor) -> list[Row]:
        """Take one more token of each row into account: (n,) ids; of those unknown, nothing."""
        if not rows:
            return []
        before = torch.stack([row.predicted for row in rows])
        known = (tokens < self.hmm.vocab_size).unsqueeze(-1)
        stepped = inference.step(self.hmm, before, tokens.clamp_max(self.hmm.vocab_size - 1))
        advanced = torch.where(known, stepped.predicted, before)
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
        mask = in_text.to(device) & ~over & (near < self.hmm.vocab_size)
        near = near.clamp_max(self.hmm.vocab_size - 1)
        predicted = self.hmm.initial.expand(len(requests), -1)
        for filtered in inference.scan(self.hmm, near, mask):
            predicted = filtered.predicted
        past = self._past(requests, tokens, prompts, lengths)
        counts = (lengths - prompts).tolist()
        return [
            Row(request, *each)
            for request, *each in zip(requests, counts, predicted, past, strict=True)
        ]

    def read_written(
        self, requests: Sequence[Request], written: Sequence[Sequence[int]]
    ) -> list[Row]:
        """Find the states of texts that are known on the host: prompts, and what is written."""
        texts = [
            torch.tensor([*request.prompt, *tokens], dtype=torch.long)
            for request, tokens in zip(requests, written, strict=True)
        ]
        if not texts:
            return []
        prompts = torch.tensor([len(request.prompt) for request in requests])
        lengths = torch.tensor([len(text) for text in texts])
        return self.read(requests, pad_sequence(texts, batch_first=True), prompts, lengths)

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

    def reweight_(self, logits: Tensor, rows: Sequence[Row | None]) -> Tensor:
        """Add the logarithms of the factors to the LM's logits, in place: (n, V or more).

        What the HMM does not know, past its vocabulary, a steered row will not write. A row that is
        None, or has no goals, is left as it is.
        """
        if len(logits) != len(rows) or logits.shape[1] < self.hmm.vocab_size:
            raise InvalidInputError(
                f"Logits have shape {tuple(logits.shape)}, but there are {len(rows)} rows, "
                f"and the HMM knows {self.hmm.vocab_size} tokens. Is it the HMM of this LM?"
            )
        steered = [(place, row) for place, row in enumerate(rows) if row and row.request.goals]
        if not steered:
            return logits
        states = torch.stack([row.predicted for _, row in steered], 1)  # (h, n)
        groups = [_Group(asked, states) for asked in _by_kind([row for _, row in steered])]
        if self.observe is not None:
            for group in groups:
                self.observe(expected(group.kind, group.average, group.weighing))
        # One product for all: the emission is read once.
        stacked = torch.cat([states, *(group.weighted for group in groups)], 1)
        places = torch.tensor([place for place, _ in steered], device=logits.device)
        neutral = [place for place, row in steered if any(g.neutral_end for g in row.request.goals)]
        ends = _Ends(logits, neutral, self._ends) if neutral else None
        blocks = list(self._blocks(stacked.shape[1]))
        memory = stacked.new_empty(blocks[0].stop, stacked.shape[1])
        for block in blocks:
            product = self.hmm.emission.predict_block(stacked, block, memory)
            factors = transposed(self._log_factors(product, len(steered), groups, block)).to(logits)
            if len(places) == len(logits):
                logits[:, block].add_(factors)
            else:  # several times as fast as to add where the places are
                logits[:, block].index_copy_(0, places, factors.add_(logits[places, block]))
        if logits.shape[1] > self.hmm.vocab_size:
            logits[places, self.hmm.vocab_size :] = -torch.inf
        if ends is not None:
            ends.restore(logits)
        return logits

    def _blocks(self, columns: int) -> Iterator[slice]:
        """Go through the vocabulary, as many tokens at once as memory should hold."""
        most = MOST_ON_CPU if self.hmm.device.type == "cpu" else MOST_ELEMENTS
        step = max(FEWEST_TOKENS, most // columns)
        for first in range(0, self.hmm.vocab_size, step):
            yield slice(first, min(first + step, self.hmm.vocab_size))

    def _log_factors(
        self, product: Tensor, rows: int, groups: Sequence["_Group"], block: slice
    ) -> Tensor:
        """Give the sum of log f(EAP) over each row's goals, of every token of a block: (b, n)."""
        widths = [group.weighted.shape[1] for group in groups]
        probability, *joints = torch.split(product, [rows, *widths], 1)
        total: Tensor | None = None
        for group, joint in zip(groups, joints, strict=True):
            own = probability if group.whole else probability[:, group.places]
            factors, common = group.log_factors(joint, own, block)
            if self.absolute:
                factors = factors + common
            if group.whole and total is None:
                total = factors  # one kind for all: nothing to add up
            else:
                total = torch.zeros_like(probability) if total is None else total
                total.index_add_(1, group.index, factors)
        assert total is not None  # every row here has a goal
        return total


class _Ends:
    """Ends of texts whose probability steering must not change: what it was."""

    def __init__(self, logits: Tensor, rows: list[int], tokens: Tensor) -> None:
        self.rows = torch.tensor(rows, device=logits.device)[:, None]
        self.tokens = tokens.to(logits.device)
        self.own = logits[self.rows, self.tokens]
        self.others = self._others(logits)

    def _others(self, logits: Tensor) -> Tensor:
        """Give the log-probability of all other tokens together, up to a constant: (n, 1)."""
        rows = logits[self.rows[:, 0]]
        rows[:, self.tokens] = -torch.inf
        return rows.logsumexp(-1, keepdim=True)

    def restore(self, logits: Tensor) -> None:
        """Let ends stand to all others as they stood before."""
        change = self._others(logits) - self.others
        logits[self.rows, self.tokens] = self.own + change.nan_to_num(0.0, 0.0, 0.0)


class _Group:
    """Goals of one kind, of some of the rows: what stays the same from block to block."""

    def __init__(self, asked: "_Asked", states: Tensor) -> None:
        self.kind, self.places = asked.kind, asked.places
        self.whole = asked.places == list(range(states.shape[1]))
        self.index = torch.tensor(asked.places, device=states.device)
        weighted = asked.ahead() * states[:, None, asked.places]  # (h, K, n)
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


@dataclass
class _Asked:
    """What rows ask of lookaheads of one kind."""

    kind: Kind
    places: list[int] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    past: list[Tensor] = field(default_factory=list)
    left: list[int] = field(default_factory=list)

    def ahead(self) -> Tensor:
        """Give every row's table for what remains to it: (h, K, n)."""
        pairs = zip(self.goals, self.left, strict=True)
        return torch.stack([goal.lookahead.ahead(left).T for goal, left in pairs], -1)

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
