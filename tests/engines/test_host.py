"""Engines on the host are steered as transformers is."""

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `transformers`")

from foretrace.engines.host import HostProcessor
from foretrace.engines.transformers import SteeringProcessor
from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM
from host_goals import KINDS, goal_of

VOCAB, NEW = 12, 5
MODEL = HMM.random(4, VOCAB, eos_token_id=0)


@pytest.mark.shows("host", "greedy", "constraints", "several goals")
@pytest.mark.parametrize("kind", KINDS)
def test_it_steers_as_transformers_does(kind: str) -> None:
    """One text after another, token by token, with more logits than the HMM has tokens."""
    generator = torch.Generator().manual_seed(1)
    goal = goal_of(kind, MODEL, NEW)
    processor = HostProcessor(goal, max_new_tokens=NEW)
    for prompt in ([3, 4, 5], [6]):
        expected = SteeringProcessor(
            goal, prompt_mask=torch.ones(1, len(prompt)), max_new_tokens=NEW
        )
        processor.begin()
        ids = list(prompt)
        for _ in range(NEW):
            scores = torch.randn(1, VOCAB + 2, generator=generator)
            steered = processor(np.array(ids, dtype=np.intc), scores[0].numpy())
            assert steered.dtype == np.float32
            torch.testing.assert_close(
                torch.from_numpy(steered), expected(torch.tensor([ids]), scores)[0]
            )
            ids.append(int(steered.argmax()))


def test_the_logits_of_the_engine_are_not_changed() -> None:
    scores = np.zeros(VOCAB, dtype=np.float32)
    steered = HostProcessor(goal_of("rewards", MODEL, NEW), max_new_tokens=NEW)(
        np.array([3]), scores
    )
    assert not scores.any()
    assert steered.any()


def test_the_price_is_reported() -> None:
    seen: list[float] = []
    processor = HostProcessor(
        goal_of("rewards", MODEL, NEW), max_new_tokens=NEW, on_price=seen.append
    )
    bare = np.zeros(VOCAB, dtype=np.float32)
    steered = torch.from_numpy(processor(np.array([3]), bare)).double().log_softmax(-1)
    price = (steered.exp() * (steered - torch.from_numpy(bare).double().log_softmax(-1))).sum()
    assert seen == pytest.approx([float(price)], abs=1e-5)


def test_another_prompt_begins_another_text() -> None:
    goal = goal_of("rewards", MODEL, NEW)
    processor, scores = HostProcessor(goal, max_new_tokens=NEW), np.zeros(VOCAB, dtype=np.float32)
    processor(np.array([3, 4]), scores)
    expected = HostProcessor(goal, max_new_tokens=NEW)(np.array([5, 6, 7]), scores)
    assert (processor(np.array([5, 6, 7]), scores) == expected).all()


def test_the_next_turn_of_a_chat_is_a_prompt() -> None:
    """It begins with the text before. What was generated there does not count any more."""
    goal, scores = goal_of("rewards", MODEL, NEW), np.zeros(VOCAB, dtype=np.float32)
    processor = HostProcessor(goal, max_new_tokens=NEW)
    for ids in ([3, 4], [3, 4, 5], [3, 4, 5, 6]):
        processor(np.array(ids), scores)
    turn = np.array([3, 4, 5, 6, 7, 8, 9])
    expected = HostProcessor(goal, max_new_tokens=NEW)(turn, scores)
    assert (processor(turn, scores) == expected).all()


def test_no_goals_change_nothing() -> None:
    scores = np.arange(VOCAB, dtype=np.float32)
    assert (HostProcessor(None, max_new_tokens=NEW)(np.array([3]), scores) == scores).all()


def test_logits_of_another_lm_are_refused() -> None:
    processor = HostProcessor(goal_of("product", MODEL, NEW), max_new_tokens=NEW)
    with pytest.raises(InvalidInputError, match="HMM of this LM"):
        processor(np.array([3]), np.zeros(VOCAB - 1, dtype=np.float32))
