"""The sampler: what it draws is what transformers would draw, and it knows how likely it is."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs the extra `transformers`")

from transformers import AutoModelForCausalLM, TopPLogitsWarper

from foretrace.attribute import Attribute
from foretrace.engines.transformers import SteeringProcessor
from foretrace.engines.transformers.sampler import Sampler
from foretrace.hmm import HMM
from foretrace.steering import CompiledGoal
from goals import plain_goal
from tiny_lm import WORDS

VOCAB, NEW, TOP_P = len(WORDS), 6, 0.8
PROMPTS = [[3, 4, 5, 6], [9]]


@pytest.fixture(scope="module")
def lm(tiny_lm: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_lm, dtype=torch.float32)


@pytest.fixture(scope="module")
def goals() -> list[CompiledGoal | None]:
    hmm = HMM.random(8, VOCAB, eos_token_id=0, seed=0)
    weights = torch.rand(VOCAB, generator=torch.Generator().manual_seed(0))
    return [plain_goal(hmm, Attribute.from_weights(weights), 8, 3.0), None]


def expected(
    lm: Any, prompt: list[int], tokens: list[int], goal: CompiledGoal | None
) -> tuple[float, float, list[float]]:
    """Compute the log-probability, the price and the bare losses, as transformers would."""
    spent: list[Tensor] = []
    processor = SteeringProcessor(
        goal, prompt_mask=torch.ones(1, len(prompt)), max_new_tokens=NEW, on_price=spent.append
    )
    total, bare = 0.0, []
    for place, token in enumerate(tokens):
        ids = torch.tensor([[*prompt, *tokens[:place]]])
        with torch.inference_mode():
            logits = lm(ids).logits[:, -1]
            scores: Tensor = processor(ids, logits)
        bare.append(-float(logits.log_softmax(-1)[0, token]))
        kept = TopPLogitsWarper(TOP_P)(ids, scores)
        total += float(kept.log_softmax(-1)[0, token])
    return total, sum(map(float, spent)) / len(tokens), bare


@pytest.mark.shows("transformers sampler", "sampling", "batch")
def test_probabilities_are_those_of_what_was_drawn(
    lm: Any, goals: list[CompiledGoal | None]
) -> None:
    """Of prompts of unlike length, steered and bare in one batch."""
    torch.manual_seed(0)
    drawn = Sampler(lm, [0], NEW, TOP_P).draw(PROMPTS, 5, goals)
    assert [len(own) for own in drawn] == [5, 5]
    assert len({tuple(each.tokens) for own in drawn for each in own}) > 3
    for prompt, own, mine in zip(PROMPTS, drawn, goals, strict=True):
        for each in own:
            assert 1 <= len(each.tokens) <= NEW
            assert 0 not in each.tokens[:-1]
            log_probability, price, bare_nats = expected(lm, prompt, each.tokens, mine)
            assert each.log_probability == pytest.approx(log_probability, abs=1e-4)
            assert each.bare_nats == pytest.approx(bare_nats, abs=1e-4)
            assert each.price == pytest.approx(price, abs=1e-5)
            assert (each.price > 0) == (mine is not None)
