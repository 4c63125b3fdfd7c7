"""Which row is which, for engines that show whole texts at every step."""

from collections.abc import Sequence

import torch
from torch import Tensor

from foretrace.hmm import HMM
from foretrace.steering.batch import Steering
from foretrace.steering.request import Request
from foretrace.steering.state import Row


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
        keys = [
            (id(request), tuple(tokens)) if request.goals else None
            for request, tokens in zip(requests, written, strict=True)
        ]
        moved, new = {}, {}
        for key, request in zip(keys, requests, strict=True):
            if key is None or key in self._known:
                continue
            owner, text = key
            before = self._known.get((owner, text[:-1])) if text else None
            if before is not None:
                moved[key] = before
            else:
                new[key] = request
        device = self.steering.hmm.device
        tokens = torch.tensor([text[-1] for _, text in moved], dtype=torch.long, device=device)
        advanced = self.steering.advance(list(moved.values()), tokens)
        read = self.steering.read_written(list(new.values()), [text for _, text in new])
        found = {**self._known, **dict(zip([*moved, *new], [*advanced, *read], strict=True))}
        self.rows = [None if key is None else found[key] for key in keys]
        self._known = {key: found[key] for key in keys if key is not None}

    def reweight(self, logits: Tensor) -> Tensor:
        """Steer the rows of the last step: (n, V or more) logits -> the same."""
        return self.steering.reweight_(logits.clone(), self.rows)
