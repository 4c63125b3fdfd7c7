"""Steering a batch of texts while they are written: the only thing here that changes.

What it keeps is a cache: everything can be found again from the token ids. Tokens and states stay
on the HMM's device, and nothing here waits for it.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM, inference
from foretrace.hmm.probability import transposed
from foretrace.lookahead.eap import expected
from foretrace.lookahead.lookahead import Lookahead
from foretrace.steering.constraints import exceptions
from foretrace.steering.goal_group import Group, by_kind
from foretrace.steering.neutral_end import Ends
from foretrace.steering.request import Request
from foretrace.steering.state import Row

# Probabilities at once; on a CPU, what fits its caches. The vocabulary is cut into blocks.
MOST_ELEMENTS, MOST_ON_CPU, FEWEST_TOKENS = 1 << 25, 1 << 19, 1024
READ_BACK = 128  # tokens that are read of a text when it is met: an HMM forgets those before


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
            Row(row.request, row.written + 1, state, _added(row.past, own), _moved(row, token))
            for row, state, own, token in zip(rows, advanced, weighed, tokens[:, None], strict=True)
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
        past, states = self._past(requests, tokens, prompts, lengths)
        counts = (lengths - prompts).tolist()
        return [
            Row(request, *each)
            for request, *each in zip(requests, counts, predicted, past, states, strict=True)
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
    ) -> tuple[list[tuple[Tensor, ...]], list[tuple[Tensor | None, ...]]]:
        """Sum the log-weights of what is written, and let automata read it, of each row's goals."""
        past, states = [], []
        bounds = zip(prompts.tolist(), lengths.tolist(), strict=True)
        for request, row, (first, last) in zip(requests, tokens, bounds, strict=True):
            written = row[first:last].to(self.hmm.device)
            lookaheads = [goal.lookahead for goal in request.goals]
            past.append(tuple(each.log_weights(written).sum(0) for each in lookaheads))
            readings = [each.reading for each in lookaheads]
            states.append(tuple(each and each.read(written) for each in readings))
        return past, states

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
        groups = [Group(pursued, states) for pursued in by_kind([row for _, row in steered])]
        if self.observe is not None:
            for group in groups:
                self._tell(group, self.observe)
        # One product for all: the emission is read once.
        stacked = torch.cat([states, *(group.weighted for group in groups)], 1)
        places = torch.tensor([place for place, _ in steered], device=logits.device)
        neutral = [place for place, row in steered if any(g.neutral_end for g in row.request.goals)]
        ends = Ends(logits, neutral, self._ends) if neutral else None
        most = MOST_ON_CPU if self.hmm.device.type == "cpu" else MOST_ELEMENTS
        size = max(FEWEST_TOKENS, most // stacked.shape[1])
        for block, product in self.hmm.emission.predict_blocks(stacked, size):
            factors = transposed(self._log_factors(product, len(steered), groups, block)).to(logits)
            if len(places) == len(logits):
                logits[:, block].add_(factors)
            else:  # several times as fast as to add where the places are
                logits[:, block].index_copy_(0, places, factors.add_(logits[places, block]))
        corrected = [(apart.places, apart.correct_(logits)) for apart in exceptions(steered)]
        if self.absolute:
            common = torch.zeros(len(logits), dtype=torch.float64, device=logits.device)
            for group in groups:
                own = places[group.index[group.plain].to(places.device)]
                common.index_add_(0, own, group.common[group.plain].to(common))
            for own_places, base in corrected:
                common[own_places] += base.to(common)
            logits += common[:, None].to(logits)
        if logits.shape[1] > self.hmm.vocab_size:
            logits[places, self.hmm.vocab_size :] = -torch.inf
        if ends is not None:
            ends.restore(logits)
        return logits

    def _log_factors(
        self, product: Tensor, rows: int, groups: Sequence[Group], block: slice
    ) -> Tensor:
        """Give the sum of log f(EAP) over each row's goals, of every token of a block: (b, n).

        What is common to all tokens is left out.
        """
        widths = [group.weighted.shape[1] for group in groups]
        probability, *joints = torch.split(product, [rows, *widths], 1)
        total: Tensor | None = None
        for group, joint in zip(groups, joints, strict=True):
            own = probability if group.whole else probability[:, group.places]
            factors = group.log_factors(joint, own, block)
            if group.whole and total is None:
                total = factors  # one kind for all: nothing to add up
            else:
                total = torch.zeros_like(probability) if total is None else total
                total.index_add_(1, group.index, factors)
        assert total is not None  # every row here has a goal
        return total

    def _tell(self, group: Group, observe: Callable[[Tensor], None]) -> None:
        """Tell the EAP of texts; what must occur is certain, and not told."""
        if group.plain:
            observe(expected(group.kind, group.average, group.weighing)[group.plain])


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


def _moved(row: Row, token: Tensor) -> tuple[Tensor | None, ...]:
    """Let the automata of a row's goals read its token: (1,)."""
    readings = [goal.lookahead.reading for goal in row.request.goals]
    return tuple(
        None if reading is None or state is None else reading.after(state, token)
        for reading, state in zip(readings, row.states, strict=True)
    )


def _added(past: tuple[Tensor, ...], own: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(before + more for before, more in zip(past, own, strict=True))
