"""Steering in the continuous batching of transformers: goals for each request."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
)

from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM
from foretrace.steering import Goal, PrefixTracker, Request
from foretrace.steering.goal import common_hmm
from foretrace.steering.merge_goals import merge_goals

if TYPE_CHECKING:
    from transformers.generation.continuous_batching import ContinuousBatchingManager

UNLIMITED = 1 << 20  # tokens


class ContinuousSteering(ContinuousBatchingLogitsProcessor):
    """Steer the requests of a continuous batch that have goals.

    `steer_requests` adds it to a manager.

    Args:
        hmm: The HMM of all goals.
    """

    def __init__(self, hmm: HMM) -> None:
        self.supported_kwargs, self.ignored_kwargs = {"goals": list}, ()
        self.hmm, self.tracker = hmm, PrefixTracker(hmm)
        # The requests of the last step, with the states of transformers that they are made of.
        self.requests: dict[str, tuple[Any, Request]] = {}

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        """Fill the argument of rows without a request: it is not used."""
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: Sequence[Any]) -> Tensor:
        """Set the rows of the next step; return an argument that is not used, (rows,)."""
        states = [future.state for future in requests_with_new_token]
        requests = [self._request(state) for state in states]
        self.requests = {
            state.request_id: (state, request)
            for state, request in zip(states, requests, strict=True)
        }
        self.tracker.step(requests, [_tokens(state)[1] for state in states])
        return torch.zeros(len(states), dtype=torch.int32)

    def __call__(  # type: ignore[override]
        self, scores: Tensor, tensor_arg: Tensor
    ) -> Tensor:
        """Reweight the next token of each row: (rows or more, V)."""
        count = len(self.tracker.rows)
        self.tracker.steering.reweight_(scores[:count], self.tracker.rows)
        return scores

    def _request(self, state: Any) -> Request:
        known, request = self.requests.get(state.request_id, (None, None))
        if request is not None and known is state:  # and not another one of the same name
            return request
        prompt, generated = _tokens(state)
        limit = None
        if state.max_new_tokens is not None:  # what is left of it, after preemption
            limit = state.max_new_tokens + len(generated) - len(state.generated_tokens)
        goals = state.logit_processor_kwargs.get("goals", [])
        return self.check(goals, prompt, limit, state._eos_token_ids)

    def check(
        self, goals: Sequence[Goal], prompt: Sequence[int], limit: int | None, ends: Iterable[int]
    ) -> Request:
        """Return what a request asks for.

        Raises:
            InvalidInputError: The goals cannot be steered toward.
        """
        hmm = common_hmm(goals)
        if hmm is not None and hmm is not self.hmm:
            raise InvalidInputError(
                "The goals of a request must use the HMM object that was passed to steer_requests."
            )
        limit = UNLIMITED if limit is None else limit
        known_ends = tuple(end for end in ends if end >= 0)
        return Request(merge_goals(goals), tuple(prompt), limit, ends=known_ends)


def steer_requests(manager: "ContinuousBatchingManager", hmm: HMM) -> None:
    """Let the requests of a continuous batch have goals: `add_request(ids, goals=[goal])`.

    Args:
        manager: The manager, before it is started.
        hmm: The HMM of all goals.

    Raises:
        InvalidInputError: The manager was started or warmed up, its requests can have goals
            already, the HMM does not fit the model, or the manager's settings do not let tokens be
            read between steps.

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
        >>> answer = next(manager.request_id_iter(name))
        >>> manager.stop(block=True)
    """
    _require_fit(manager, hmm)
    processors, steering = manager.logit_processor, ContinuousSteering(hmm)
    processors.logits_processor.insert(0, steering)  # before temperature and top-p
    processors.tensors_required += 1
    processors.supported_keys |= steering.supported_kwargs
    processors.do_processing = True
    manager.add_request = _checked(manager, steering)  # type: ignore[method-assign]


def _checked(
    manager: "ContinuousBatchingManager", steering: ContinuousSteering
) -> Callable[..., str | None]:
    """Return `add_request` with a check of the goals: an error later would end all requests."""
    add_request = manager.add_request

    def add_checked(
        input_ids: list[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        *,
        goals: Sequence[Goal] = (),
        **options: Any,
    ) -> str | None:
        limit = (
            manager.generation_config.max_new_tokens if max_new_tokens is None else max_new_tokens
        )
        steering.check(goals, input_ids, limit, ())
        return add_request(input_ids, request_id, max_new_tokens, goals=list(goals), **options)

    return add_checked


def _require_fit(manager: "ContinuousBatchingManager", hmm: HMM) -> None:
    """Refuse a manager that cannot be steered."""
    config = manager.continuous_batching_config
    graphs = config.use_cuda_graph
    has_graphs = any(graphs) if isinstance(graphs, tuple) else bool(graphs)
    compiled = config.varlen_compile_config or config.decode_compile_config
    if config.use_async_batching or has_graphs or compiled:
        raise InvalidInputError(
            "Steering reads the tokens of a step before the next one begins. Use "
            "ContinuousBatchingConfig(use_async_batching=False, use_cuda_graph=False), without "
            "compilation."
        )
    processors = manager.logit_processor.logits_processor
    if any(isinstance(one, ContinuousSteering) for one in processors):
        raise InvalidInputError("The requests of this manager can have goals already.")
    if manager.batch_processor is not None:
        raise InvalidInputError("Call steer_requests before the manager is started or warmed up.")
    vocab_size = manager.model.config.get_text_config().vocab_size
    if hmm.vocab_size > vocab_size or hmm.device != manager.model.device:
        raise InvalidInputError(
            f"The HMM has {hmm.vocab_size} tokens and is on {hmm.device}, but the LM has "
            f"{vocab_size} and is on {manager.model.device}. Use the HMM of this LM, and hmm.to()."
        )


def _tokens(state: Any) -> tuple[list[int], list[int]]:
    """Return the prompt and the generated tokens: after preemption, all of them are the prompt."""
    length = state._true_initial_tokens or len(state.initial_tokens)
    tokens = [*state.initial_tokens, *state.generated_tokens]
    return tokens[:length], tokens[length:]
