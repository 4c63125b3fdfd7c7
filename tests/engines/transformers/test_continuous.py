"""Continuous batching writes what `generate` writes, with other goals for each request."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `transformers`")

from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ContinuousBatchingConfig,
    GenerationConfig,
)
from transformers.generation.continuous_batching.requests import RequestState

from foretrace.attribute import Attribute
from foretrace.engines.transformers import generate_tokens
from foretrace.engines.transformers.continuous import ContinuousSteering, steer_requests
from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM
from foretrace.lookahead import Lookahead
from foretrace.steering import Goal
from tiny_lm import WORDS

VOCAB, NEW = len(WORDS), 8
PROMPTS = [[5, 6, 7], [8], [9, 10], [11, 12, 13, 14], [15, 16], [17], [18, 19], [20]]


@pytest.fixture
def model(tiny_lm: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_lm, dtype=torch.float32)


@pytest.fixture(scope="module")
def hmm() -> HMM:
    return HMM.random(4, VOCAB, eos_token_id=0, seed=1)


def goals_of(hmm: HMM) -> list[list[Goal]]:
    """Return other goals for each prompt; none for the last."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(len(PROMPTS), VOCAB, generator=generator)
    attributes = [Attribute.from_rewards(4 * row - 2) for row in drawn[:4]]
    attributes += [Attribute.from_weights(row) for row in drawn[4:6]]
    token_bytes = [b"", *[bytes([65 + token]) for token in range(VOCAB - 1)]]
    attributes.append(Attribute.contains("FG", token_bytes))
    return [[Goal(Lookahead(hmm, one, NEW), 3.0)] for one in attributes] + [[]]


def manager_of(model: Any, **options: Any) -> Any:
    config: Any = GenerationConfig(do_sample=False, max_new_tokens=NEW, eos_token_id=0)
    settings: dict[str, Any] = {"use_async_batching": False, "use_cuda_graph": False, **options}
    return model.init_continuous_batching(
        config, ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=16, **settings)
    )


@pytest.mark.shows("transformers continuous batching", "greedy", "batch", "constraints")
def test_it_writes_what_generate_writes(model: Any, hmm: HMM, tiny_lm: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm)
    tokenizer.pad_token = tokenizer.eos_token
    goals = goals_of(hmm)
    expected = generate_tokens(
        model, tokenizer, PROMPTS, goal=goals, max_new_tokens=NEW, do_sample=False, eos_token_id=0
    )
    bare = generate_tokens(
        model, tokenizer, PROMPTS, max_new_tokens=NEW, do_sample=False, eos_token_id=0
    )
    assert sum(one != other for one, other in zip(expected, bare, strict=True)) >= 5
    manager = manager_of(model)
    steer_requests(manager, hmm)
    manager.start()
    names = [
        manager.add_request(prompt, goals=own) for prompt, own in zip(PROMPTS, goals, strict=True)
    ]
    answers = [next(manager.request_id_iter(name)) for name in names]
    manager.stop(block=True)
    assert [list(answer.generated_tokens) for answer in answers] == expected


def test_a_preempted_request_keeps_its_state(hmm: HMM) -> None:
    """transformers moves its tokens to the prompt, and copies its arguments."""
    goals = goals_of(hmm)[0]
    state = RequestState("a", [5, 6], max_new_tokens=NEW, logit_processor_kwargs={"goals": goals})
    state.generated_tokens = [7, 8, 9]
    resumed = state.create_equivalent_initial_request()
    steered = []
    for one in (state, resumed):
        steering = ContinuousSteering(hmm)
        argument = steering.prepare_tensor_args([SimpleNamespace(state=one)])
        steered.append(steering(torch.zeros(2, VOCAB), argument))  # the second row is padding
        _, request = steering.requests["a"]
        assert request.goals == tuple(goals)
        assert request.limit == NEW
    assert torch.equal(*steered)
    assert steered[0][0].any()
    assert not steered[0][1].any()


def test_another_request_of_the_same_name_has_its_own_goals(hmm: HMM) -> None:
    steering = ContinuousSteering(hmm)
    for goals in goals_of(hmm)[:2]:
        arguments = {"goals": goals}
        state = RequestState("a", [5], max_new_tokens=NEW, logit_processor_kwargs=arguments)
        steering.prepare_tensor_args([SimpleNamespace(state=state)])
        assert steering.requests["a"][1].goals == tuple(goals)


def test_goals_that_cannot_be_reached_are_refused_at_once(model: Any, hmm: HMM) -> None:
    """In the thread of the caller: in that of the manager, it would end all requests."""
    manager = manager_of(model)
    steer_requests(manager, hmm)
    required = goals_of(hmm)[6]
    with pytest.raises(InvalidInputError, match="at most 1"):
        manager.add_request([5], max_new_tokens=1, goals=required)
    other = HMM.random(4, VOCAB, eos_token_id=0)
    with pytest.raises(InvalidInputError, match="passed to steer_requests"):
        manager.add_request([5], goals=goals_of(other)[0])
    with pytest.raises(InvalidInputError, match="already"):
        steer_requests(manager, hmm)


def test_an_hmm_of_another_lm_is_refused(model: Any) -> None:
    with pytest.raises(InvalidInputError, match="the LM has"):
        steer_requests(manager_of(model), HMM.random(4, VOCAB + 1))


def test_settings_that_hide_tokens_are_refused(model: Any, hmm: HMM) -> None:
    manager = manager_of(model)
    manager.continuous_batching_config.use_async_batching = True
    with pytest.raises(InvalidInputError, match="use_async_batching=False"):
        steer_requests(manager, hmm)
