"""A logits processor for engines that keep logits on the host, one sequence at a time."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretrace.steering import Goal, PrefixTracker, Request
from foretrace.steering.goal import common_hmm
from foretrace.steering.merge_goals import merge_goals


class HostProcessor:
    """Steer one sequence after another, from its token ids and logits as numpy arrays.

    The token ids of the first call are the prompt, and so are those of the first call after
    `begin`, and of a call whose ids do not continue the prompt before.

    Args:
        goals: The goals. Several goals without a transform are one product, and have one lookahead
            table; their windows must be the same.
        max_new_tokens: Tokens to generate at most. The lookahead covers what remains of them.
        ends: Tokens that end a text, in addition to the HMM's.
        observe: Called at every step with the price of steering: the KL divergence of the steered
            from the bare next-token distribution in nats. By default, it is not computed.

    Raises:
        InvalidInputError: The goals have different HMMs, or cannot be merged.

    Example:
        >>> import numpy as np
        >>> from foretrace.engines.host import HostProcessor
        >>> goal = ft.Goal(ft.Lookahead(hmm, attribute, horizon=8), strength=2.0)
        >>> processor = HostProcessor([goal], max_new_tokens=8)
        >>> logits = np.zeros(hmm.vocab_size, dtype=np.float32)
        >>> processor(np.array([5, 6]), logits).shape == logits.shape
        True
    """

    def __init__(
        self,
        goals: Sequence[Goal],
        *,
        max_new_tokens: int,
        ends: Sequence[int] = (),
        observe: Callable[[float], None] | None = None,
    ) -> None:
        self.goals, self.max_new_tokens, self.ends = merge_goals(goals), max_new_tokens, tuple(ends)
        self.observe = observe
        hmm, observe_row = common_hmm(goals), None if observe is None else self._observe
        self.tracker = None if hmm is None else PrefixTracker(hmm, observe=observe_row)
        self.request: Request | None = None

    def begin(self) -> None:
        """Begin a text: the token ids of the next call are its prompt."""
        self.request = None

    def __call__(
        self, input_ids: NDArray[np.integer], scores: NDArray[np.floating]
    ) -> NDArray[np.float32]:
        """Reweight the next token.

        Args:
            input_ids: The prompt and the generated tokens, (length,).
            scores: Logits of the next token, (V or more,). They are not changed.

        Returns:
            The steered logits, of the same shape.

        Raises:
            InvalidInputError: If the logits do not fit the HMM's vocabulary.
        """
        logits = np.array(scores, dtype=np.float32)
        if self.tracker is None:
            return logits
        ids = input_ids.tolist()
        if self.request is None or tuple(ids[: len(self.request.prompt)]) != self.request.prompt:
            self.request = Request(self.goals, tuple(ids), self.max_new_tokens, ends=self.ends)
        self.tracker.step([self.request], [ids[len(self.request.prompt) :]])
        steering = self.tracker.steering
        device = steering.hmm.device
        steered = steering.reweight_(torch.from_numpy(logits)[None].to(device), self.tracker.rows)
        return np.asarray(steered[0].cpu().numpy())

    def _observe(self, prices: Tensor, is_steered: Tensor) -> None:
        assert self.observe is not None
        self.observe(float(prices[0]))
