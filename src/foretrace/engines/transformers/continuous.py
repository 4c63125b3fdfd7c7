"""Steering in the continuous batching of transformers: goals for each request."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
)

from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM
from foretrace.steering import PrefixTracker, Request
from foretrace.steering.merge_goals import merge_goals

if TYPE_CHECKING:
    from transformers.generation.continuous_batching import ContinuousBatchingManager


class ContinuousSteering(ContinuousBatchingLogitsProcessor):
    """Steer the requests of a continuous batch that have goals.

    `steer_requests` adds it to a manager.

    Args:
        hmm: The HMM of all goals.
    """

    def __init__(self, hmm: HMM) -> None:
        self.supported_kwargs, self.ignored_kwargs = {"goals": list}, ()
        self.tracker = PrefixTracker(hmm)
        self.requests: dict[str, Request] = {}  # by their ids, of the last step

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        """Fill the argument of rows without a request: it is not used."""
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: Sequence[Any]) -> Tensor:
        """Set the rows of the next step; return an argument that is not used, (rows,)."""
        states = [future.state for future in requests_with_new_token]
        self.requests = {
            state.request_id: self.requests.get(state.request_id) or _request(state)
            for state in states
        }
        self.tracker.step(
            [self.requests[state.request_id] for state in states],
            [_tokens(state)[1] for state in states],
        )
        return torch.zeros(len(states), dtype=torch.int32)

    def __call__(  # type: ignore[override]
        self, scores: Tensor, tensor_arg: Tensor
    ) -> Tensor:
        """Reweight the next token of each row: (rows or more, V)."""
        count = len(self.tracker.rows)
        self.tracker.steering.reweight_(scores[:count], self.tracker.rows)
        return scores


def steer_requests(manager: "ContinuousBatchingManager", hmm: HMM) -> None:
    """Let the requests of a continuous batch have goals: `add_request(ids, goals=[goal])`.

    Args:
        manager: The manager, before it is started.
        hmm: The HMM of all goals.

    Raises:
        InvalidInputError: The manager is running, or its settings do not let tokens be read between
            steps.

    Example:
        >>> from transformers import ContinuousBatchingConfig, GenerationConfig
        >>> from foretrace.engines.transformers.continuous import steer_requests
        >>> goal = ft.Goal(ft.Lookahead(hmm, attribute, horizon=8), strength=2.0)
        >>> manager = model.init_continuous_batching(
        ...     GenerationConfig(do_sample=False, max_new_tokens=4, eos_token_id=0),
        ...     ContinuousBatchingConfig(use_async_batching=False, use_cuda_graph=False),
        ... )
        >>> steer_requests(manager, hmm)
        >>> manager.start()
        >>> name = manager.add_request([5, 6], goals=[goal])
        >>> answer = manager.get_result(name, timeout=60)
        >>> manager.stop(block=True)
    """
    config = manager.continuous_batching_config
    if config.use_async_batching or _any(config.use_cuda_graph):
        raise InvalidInputError(
            "Steering reads the tokens of a step before the next one begins. Use "
            "ContinuousBatchingConfig(use_async_batching=False, use_cuda_graph=False)."
        )
    if manager.is_running():
        raise InvalidInputError("The manager is running. Call steer_requests before it is started.")
    processors, steering = manager.logit_processor, ContinuousSteering(hmm)
    processors.logits_processor.insert(0, steering)  # before temperature and top-p
    processors.tensors_required += 1
    processors.supported_keys |= steering.supported_kwargs
    processors.do_processing = True


def _any(flags: bool | Sequence[bool] | None) -> bool:
    return bool(flags) if isinstance(flags, bool) or flags is None else any(flags)


def _request(state: Any) -> Request:
    prompt, generated = _tokens(state)
    goals = merge_goals(state.logit_processor_kwargs.get("goals", []))
    limit = 1 << 20
    if state.max_new_tokens is not None:  # what is left of it, after preemption
        limit = state.max_new_tokens + len(generated) - len(state.generated_tokens)
    ends = tuple(end for end in state._eos_token_ids if end >= 0)
    return Request(goals, tuple(prompt), limit, ends=ends)


def _tokens(state: Any) -> tuple[list[int], list[int]]:
    """Return the prompt and the generated tokens: after preemption, all of them are the prompt."""
    length = state._true_initial_tokens or len(state.initial_tokens)
    tokens = [*state.initial_tokens, *state.generated_tokens]
    return tokens[:length], tokens[length:]
