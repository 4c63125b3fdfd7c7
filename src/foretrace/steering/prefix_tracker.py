"""Steering for engines that pass whole sequences at every step."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from foretrace.hmm import HMM
from foretrace.steering.batch import BatchSteering
from foretrace.steering.request import Request
from foretrace.steering.state import SequenceState


class PrefixTracker:
    """Steer a batch whose rows are given as whole sequences at every step.

    Rows may come, go and change places, as in beam search. A sequence that extends one of the step
    before by one token advances the state of that one. All others are read from their tokens.

    Attributes:
        steering: The steering of the batch.
        states: The states of the rows of the last step; None for rows without goals.

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
        observe: Callable[[Tensor], None] | None = None,
        absolute: bool = False,
    ) -> None:
        """Create a tracker without rows.

        Args:
            hmm: The HMM of all goals.
            observe: As for `BatchSteering`.
            absolute: As for `BatchSteering`.
        """
        self.steering = BatchSteering(hmm, observe, absolute=absolute)
        self.states: list[SequenceState | None] = []
        self._cache: dict[tuple[int, tuple[int, ...]], SequenceState] = {}

    def step(self, requests: Sequence[Request], generated: Sequence[Sequence[int]]) -> None:
        """Set the rows of this step.

        Args:
            requests: The request of each row. Pass the same objects at every step.
            generated: The generated token ids of each row, without the prompt.
        """
        keys = [
            (id(request), tuple(tokens)) if request.goals else None
            for request, tokens in zip(requests, generated, strict=True)
        ]
        extended, new = {}, {}
        for key, request in zip(keys, requests, strict=True):
            if key is None or key in self._cache:
                continue
            request_id, tokens = key
            previous = self._cache.get((request_id, tokens[:-1])) if tokens else None
            if previous is not None:
                extended[key] = previous
            else:
                new[key] = request
        last = torch.tensor([tokens[-1] for _, tokens in extended], dtype=torch.long)
        last = last.to(self.steering.hmm.device, non_blocking=True)
        advanced = self.steering.advance(list(extended.values()), last)
        read = self.steering.read_generated(list(new.values()), [tokens for _, tokens in new])
        known = {**self._cache, **dict(zip([*extended, *new], [*advanced, *read], strict=True))}
        self.states = [None if key is None else known[key] for key in keys]
        self._cache = {key: known[key] for key in keys if key is not None}

    def reweight(self, logits: Tensor) -> Tensor:
        """Steer the rows of the last step.

        Args:
            logits: The language model's logits, (n, V or more). They are not changed.

        Returns:
            The steered logits, of the same shape.

        Raises:
            InvalidInputError: If the logits do not fit the rows or the HMM's vocabulary.
        """
        return self.steering.reweight_(logits.clone(), self.states)
