"""Steering for engines that pass whole sequences at every step."""

from collections.abc import Sequence

import torch
from torch import Tensor

from foretrace.hmm import HMM
from foretrace.steering.request import Request
from foretrace.steering.slots import Observe, SlotSteering

Key = tuple[int, tuple[int, ...]]


class PrefixTracker:
    """Steer a batch whose rows are given as whole sequences at every step.

    Rows may come, go and change places, as in beam search. A sequence that extends one of the step
    before by one token advances the state of that one. All others are read from their tokens.

    Attributes:
        steering: The steering of the batch. Row i has slot i.
        rows: The slot of each row of the last step; None for rows without goals.

    Example:
        >>> from foretrace.steering import PrefixTracker, Request
        >>> request = Request((ft.Goal(ft.Lookahead(hmm, attribute, 8)),), prompt=(5,), limit=20)
        >>> tracker = PrefixTracker(hmm)
        >>> tracker.step([request, request], [[7], [9]])
        >>> tracker.reweight(torch.zeros(2, hmm.vocab_size)).shape == (2, hmm.vocab_size)
        True
    """

    def __init__(
        self,
        hmm: HMM,
        *,
        observe: Observe | None = None,
        absolute: bool = False,
    ) -> None:
        """Create a tracker without rows.

        Args:
            hmm: The HMM of all goals.
            observe: As for `SlotSteering`.
            absolute: As for `SlotSteering`.
        """
        self.steering = SlotSteering(hmm, observe, absolute=absolute)
        self.rows: list[int | None] = []
        self._slots: dict[Key, int] = {}  # of the last step

    def step(self, requests: Sequence[Request], generated: Sequence[Sequence[int]]) -> None:
        """Set the rows of this step.

        Args:
            requests: The request of each row. Pass the same objects at every step.
            generated: The generated token ids of each row, without the prompt.
        """
        keys: list[Key | None] = [
            (id(request), tuple(tokens)) if request.goals else None
            for request, tokens in zip(requests, generated, strict=True)
        ]
        sources, tokens, moved, new = list(range(len(keys))), [0] * len(keys), [], []
        for row, key in enumerate(keys):
            if key is None:
                continue
            request, prefix = key
            if key in self._slots:
                sources[row] = self._slots[key]
            elif prefix and (request, prefix[:-1]) in self._slots:
                sources[row], tokens[row] = self._slots[request, prefix[:-1]], prefix[-1]
                moved.append(row)
            else:
                new.append(row)
        self.rows = [None if key is None else row for row, key in enumerate(keys)]
        self._slots = {key: row for row, key in enumerate(keys) if key is not None}
        self.steering.assign(dict(enumerate(requests)), sources)
        self._advance(tokens, moved)
        self.steering.read_generated(
            new, [requests[row] for row in new], [generated[row] for row in new]
        )

    def _advance(self, tokens: list[int], moved: list[int]) -> None:
        if not moved:
            return
        device, mask = self.steering.hmm.device, None
        if len(moved) < len([row for row in self.rows if row is not None]):
            mask = torch.zeros(len(tokens), dtype=torch.bool)
            mask[moved] = True
            mask = mask.to(device, non_blocking=True)
        ids = torch.tensor(tokens, dtype=torch.long).to(device, non_blocking=True)
        self.steering.advance(self.rows, ids, mask)

    def reweight(self, logits: Tensor) -> Tensor:
        """Steer the rows of the last step.

        Args:
            logits: The language model's logits, (n, V or more). They are not changed.

        Returns:
            The steered logits, of the same shape.

        Raises:
            InvalidInputError: If the logits do not fit the rows or the HMM's vocabulary.
        """
        return self.steering.reweight_(logits.clone(), self.rows)
