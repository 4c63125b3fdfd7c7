"""A logits processor for engines that keep logits on the host, one sequence at a time."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from foretrace.engines.prefix_tracker import PrefixTracker
from foretrace.steering import CompiledGoal, Request


class HostProcessor:
    """Steer one sequence after another, from its token ids and logits as numpy arrays.

    A call continues a text if its token ids are the ids of the call before, with or without one
    more token. The ids of any other call are a prompt, and so are the ids of the first call after
    `begin`.

    Args:
        goal: The goal; None to leave logits unchanged.
        max_new_tokens: Tokens to generate at most. The lookahead covers what remains of them.
        stop_ids: Tokens that end a text, in addition to the HMM's.
        on_price: Called at every step with the price of steering: the KL divergence of the steered
            from the bare next-token distribution in nats. By default, it is not computed.

    Example:
        >>> import numpy as np
        >>> from foretrace.engines.host import HostProcessor
        >>> goal = ft.Compiler(hmm, horizon=8).compile(ft.Goal(attribute, strength=2.0))
        >>> processor = HostProcessor(goal, max_new_tokens=8)
        >>> logits = np.zeros(hmm.vocab_size, dtype=np.float32)
        >>> processor(np.array([5, 6]), logits).shape == logits.shape
        True
    """

    def __init__(
        self,
        goal: CompiledGoal | None,
        *,
        max_new_tokens: int,
        stop_ids: Sequence[int] = (),
        on_price: Callable[[float], None] | None = None,
    ) -> None:
        self.goal, self.max_new_tokens, self.stop_ids = goal, max_new_tokens, tuple(stop_ids)
        self.on_price = on_price
        self.tracker = None if goal is None else PrefixTracker(goal.hmm)
        self.request: Request | None = None
        self._ids: list[int] = []  # of the last call

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
        if self.request is None or self._ids not in (ids, ids[:-1]):
            self.request = Request(self.goal, tuple(ids), self.max_new_tokens, None, self.stop_ids)
        self._ids = ids
        self.tracker.step([self.request], [ids[len(self.request.prompt) :]])
        steered = torch.from_numpy(logits)[None].to(self.tracker.steering.hmm.device)
        prices = self.tracker.reweight_(steered, measure=self.on_price is not None)
        if self.on_price is not None and prices is not None:
            self.on_price(float(prices.nats[0]))
        return np.asarray(steered[0].cpu().numpy())
