"""Steering for engines that pass whole sequences at every step."""

from collections.abc import Sequence

import torch
from torch import Tensor

from foretrace.hmm import HMM
from foretrace.steering import Request, Steering
from foretrace.steering.batch_index import to_device
from foretrace.steering.steering import StepPrices

Key = tuple[int, tuple[int, ...]]


class PrefixTracker:
    """Steer a batch whose rows are given as whole sequences at every step.

    Rows may come, go and change places, as in beam search. A sequence that extends one of the step
    before by one token advances the state of that one. All others are read from their tokens.

    Attributes:
        steering: The steering of the batch. Row i has slot i.
        rows: The slot of each row of the last step; None for rows without a goal.

    Example:
        >>> from foretrace.engines.prefix_tracker import PrefixTracker
        >>> from foretrace.steering import Request
        >>> compiled = ft.Compiler(hmm, horizon=8).compile(ft.Goal(attribute, 2.0))
        >>> request, tracker = Request(compiled, prompt=(5,), limit=20), PrefixTracker(hmm)
        >>> tracker.step([request, request], [[7], [9]])
        >>> logits = torch.zeros(2, hmm.vocab_size)
        >>> prices = tracker.reweight_(logits)
    """

    def __init__(self, hmm: HMM) -> None:
        """Create a tracker without rows, for goals of an HMM."""
        self.steering = Steering(hmm)
        self.rows: list[int | None] = []
        self._slots: dict[Key, int] = {}  # of the last step
        self._requests: list[Request] = []  # of the last step: no other object has their identity

    def step(self, requests: Sequence[Request], generated: Sequence[Sequence[int]]) -> None:
        """Set the rows of this step.

        Args:
            requests: The request of each row. Pass the same objects at every step.
            generated: The generated token ids of each row, without the prompt.
        """
        keys: list[Key | None] = [
            None if request.goal is None else (id(request), tuple(tokens))
            for request, tokens in zip(requests, generated, strict=True)
        ]
        sources, tokens, moved, new = {}, [0] * len(keys), [], {}
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
                new[row] = requests[row]
        self.rows = [None if key is None else row for row, key in enumerate(keys)]
        self._slots = {key: row for row, key in enumerate(keys) if key is not None}
        self._requests = list(requests)
        self.steering.move(sources)
        self.steering.finish([slot for slot in (*self.steering.slots,) if slot not in sources])
        self._advance(tokens, moved)
        self.steering.start(new, {row: generated[row] for row in new})

    def _advance(self, tokens: list[int], moved: list[int]) -> None:
        if not moved:
            return
        device, mask = self.steering.hmm.device, None
        rows = [row if row in self.steering.slots else None for row in range(len(tokens))]
        if len(moved) < len(self.steering.slots):
            mask = torch.zeros(len(tokens), dtype=torch.bool)
            mask[moved] = True
            mask = mask.to(device, non_blocking=True)
        self.steering.advance(rows, to_device(tokens, device), mask)

    def reweight_(self, logits: Tensor, *, measure: bool = False) -> StepPrices | None:
        """Steer the rows of the last step, in place; see `Steering.reweight_`.

        Args:
            logits: The language model's logits, (n, V or more).
            measure: Whether to compute prices.

        Returns:
            The prices of the rows with a goal, if `measure` is set and there are such rows.

        Raises:
            InvalidInputError: If the logits do not fit the rows or the HMM's vocabulary.
        """
        return self.steering.reweight_(logits, self.rows, measure=measure)
