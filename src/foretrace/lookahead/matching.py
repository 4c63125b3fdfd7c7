"""Which row is which, for engines that show whole texts at every step."""

from collections.abc import Sequence

import torch
from torch import Tensor

from foretrace.hmm import HMM
from foretrace.lookahead.row import Request, Row
from foretrace.lookahead.steering import Steering


class Matching:
    """Steering where whole texts are shown at every step: rows come, go, and change places.

    A row whose text is not that of the step before with one token more is matched to another
    row's, or read anew.
    """

    def __init__(self, hmm: HMM, *, absolute: bool = False) -> None:
        self.steering = Steering(hmm, absolute=absolute)
        self.rows: list[Row | None] = []
        self._known: dict[tuple[int, tuple[int, ...]], Row] = {}

    def step(self, requests: Sequence[Request], written: Sequence[Sequence[int]]) -> None:
        """Take in what each row is now."""
        asked = [
            (request, tuple(tokens))
            for request, tokens in zip(requests, written, strict=True)
            if request.goals
        ]
        moved, new = {}, {}
        for request, text in asked:
            key = (id(request), text)
            before = self._known.get((id(request), text[:-1])) if text else None
            if key not in self._known and before is not None:
                moved[key] = before
            elif key not in self._known:
                new[key] = request
        device = self.steering.hmm.device
        tokens = torch.tensor([text[-1] for _, text in moved], dtype=torch.long, device=device)
        advanced = self.steering.advance(list(moved.values()), tokens)
        found = dict(zip(moved, advanced, strict=True))
        read = self.steering.read_written(list(new.values()), [text for _, text in new])
        found |= zip(new, read, strict=True)
        self._known = {
            key: found.get(key) or self._known[key]
            for key in ((id(request), text) for request, text in asked)
        }
        self.rows = [
            self._known.get((id(request), tuple(tokens)))
            for request, tokens in zip(requests, written, strict=True)
        ]

    def reweight(self, logits: Tensor) -> Tensor:
        """Steer the rows of the last step: (n, V or more) logits -> the same."""
        return self.steering.reweight_(logits.clone(), self.rows)
