"""Steering in `generate`: every way of calling it, on a tiny real LM."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs the extra `transformers`")

from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessorList

from foretrace.attribute import Attribute, LogitAffine
from foretrace.engines.prefix_tracker import PrefixTracker
from foretrace.engines.transformers import Goals, SteeringProcessor, generate
from foretrace.errors import InvalidInputError, TokenizerMismatchError
from foretrace.hmm import HMM, HMMConfig
from foretrace.steering import CompiledGoal, Compiler, Goal, Request
from foretrace.steering.price import prices
from goals import compiled, plain_goal
from tiny_lm import WORDS

VOCAB, NEW = len(WORDS), 8
PROMPTS = ["w1 w2 w3 w4", "w5", "w6 w7"]


@pytest.fixture(scope="module")
def lm(tiny_lm: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_lm, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(tiny_lm: Path) -> Any:
    loaded = AutoTokenizer.from_pretrained(tiny_lm)
    loaded.pad_token = loaded.eos_token
    return loaded


@pytest.fixture(scope="module")
def hmm() -> HMM:
    return HMM.random(8, VOCAB, eos_token_id=0, seed=0)


def weights(seed: int) -> Tensor:
    return torch.rand(VOCAB, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def goals(hmm: HMM) -> list[CompiledGoal]:
    """Return two goals, and both together."""
    one, two = (Attribute.from_weights(weights(seed)) for seed in (0, 1))
    transforms = LogitAffine(3.0), LogitAffine(2.0, -1.0)
    first, second = (
        Goal(attribute, 1.0, transform=transform, neutral_end=False)
        for attribute, transform in zip((one, ~two & one), transforms, strict=True)
    )
    compiler = Compiler(hmm, NEW)
    return [compiler.compile(row) for row in ([first], [second], [first, second])]


def write(
    lm: Any, tokenizer: Any, prompts: Sequence[str], goals: Goals, **options: Any
) -> list[list[int]]:
    """Write greedily, unless options say otherwise; ids of what is new, without padding."""
    inputs = tokenizer(list(prompts), return_tensors="pt", padding=True, padding_side="left")
    mask = inputs["attention_mask"]
    processor = options.pop("processor", None) or SteeringProcessor(
        goals, prompt_mask=mask, max_new_tokens=NEW
    )
    settings = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0} | options
    steered = LogitsProcessorList([processor])
    ids = lm.generate(**inputs, logits_processor=steered, **settings)
    new: list[list[int]] = ids[:, mask.shape[1] :].tolist()
    return [row[: row.index(0)] if 0 in row else row for row in new]


@pytest.mark.shows("transformers generate", "sampling")
def test_a_forbidden_token_is_never_written(lm: Any, tokenizer: Any, hmm: HMM) -> None:
    allowed = (torch.arange(VOCAB) % 2 == 1).float()
    goal = plain_goal(hmm, Attribute.from_weights(allowed), NEW)
    drawn = write(lm, tokenizer, PROMPTS * 10, goal, do_sample=True)
    assert all(token % 2 == 1 or token == 0 for row in drawn for token in row)


@pytest.mark.shows("transformers generate", "greedy", "batch", "several goals")
def test_a_batch_equals_its_rows_padded_or_not(
    lm: Any, tokenizer: Any, goals: list[CompiledGoal]
) -> None:
    """Rows of unlike length, with goals of their own, several, and none."""
    own = [goals[2], goals[0], None]
    together = write(lm, tokenizer, PROMPTS, own)
    for prompt, mine, row in zip(PROMPTS, own, together, strict=True):
        assert row == write(lm, tokenizer, [prompt], mine)[0]
    bare = write(lm, tokenizer, PROMPTS, None)
    assert together[2] == bare[2]
    assert together[0] != bare[0]


def test_prices_of_all_rows_are_observed(hmm: HMM) -> None:
    goal = compiled(hmm, Attribute.from_weights(weights(0)), NEW, 2.0)
    observed: list[Tensor] = []
    processor = SteeringProcessor(
        [goal, None, goal],
        prompt_mask=torch.ones(3, 2),
        max_new_tokens=NEW,
        on_price=observed.append,
    )
    logits = torch.randn(6, VOCAB)  # two beams of each prompt
    steered = processor(torch.tensor([[3, 4]] * 6), logits)
    torch.testing.assert_close(observed, [prices(logits, steered)])
    assert [price > 0 for price in observed[0]] == [True, True, False, False, True, True]


def test_one_object_serves_many_calls(lm: Any, tokenizer: Any, goals: list[CompiledGoal]) -> None:
    mask = torch.ones(1, 2, dtype=torch.long)
    processor = SteeringProcessor(goals[0], prompt_mask=mask, max_new_tokens=NEW)
    for prompt in ("w6 w7", "w9 w1", "w6 w7"):
        again = write(lm, tokenizer, [prompt], None, processor=processor)
        assert again == write(lm, tokenizer, [prompt], goals[0])


class Forgetful(PrefixTracker):
    """A steering that keeps nothing: every state is found from the tokens alone."""

    def step(self, requests: Sequence[Request], written: Sequence[Sequence[int]]) -> None:
        self._slots = {}
        super().step(requests, written)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 4},
        {"num_beams": 4, "num_return_sequences": 3},
        {"do_sample": True, "num_return_sequences": 4},
        {"num_beams": 3, "do_sample": True},
    ],
)
def test_the_state_is_a_cache(
    lm: Any, tokenizer: Any, goals: list[CompiledGoal], hmm: HMM, options: dict[str, Any]
) -> None:
    """Beams change places: with states that are matched or found anew, the texts are the same."""
    mask = tokenizer(PROMPTS, return_tensors="pt", padding=True, padding_side="left")
    processor = SteeringProcessor(goals[2], prompt_mask=mask["attention_mask"], max_new_tokens=NEW)
    torch.manual_seed(0)
    cached = write(lm, tokenizer, PROMPTS, None, processor=processor, **options)
    processor.tracker = Forgetful(hmm)
    torch.manual_seed(0)
    assert write(lm, tokenizer, PROMPTS, None, processor=processor, **options) == cached
    torch.manual_seed(0)
    assert write(lm, tokenizer, PROMPTS, None, **options) != cached


def test_past_the_horizon_it_is_still_steered(lm: Any, tokenizer: Any, hmm: HMM) -> None:
    allowed = (torch.arange(VOCAB) < 32).float()
    goal = plain_goal(hmm, Attribute.from_weights(allowed), 2)
    drawn = write(lm, tokenizer, PROMPTS * 5, goal, do_sample=True, max_new_tokens=24)
    assert all(token < 32 for row in drawn for token in row)


def test_a_prompt_may_begin_with_end_of_text(hmm: HMM, goals: list[CompiledGoal]) -> None:
    scores = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    found = []
    for prompt in ([3, 4], [0, 3, 4], [9, 0, 0, 3, 4]):
        ids = torch.tensor([prompt])
        processor = SteeringProcessor(
            goals[2], prompt_mask=torch.ones_like(ids), max_new_tokens=NEW
        )
        found.append(processor(ids, scores))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_what_the_hmm_does_not_know_is_not_written(goals: list[CompiledGoal]) -> None:
    ids = torch.tensor([[3, 4], [5, 6]])
    processor = SteeringProcessor(
        [goals[0], None], prompt_mask=torch.ones_like(ids), max_new_tokens=NEW
    )
    wider = processor(ids, torch.zeros(2, VOCAB + 3))
    assert (wider[0, VOCAB:] == -torch.inf).all()
    assert wider[0, :VOCAB].isfinite().all()
    assert (wider[1] == 0).all()


def test_one_line(lm: Any, tokenizer: Any, goals: list[CompiledGoal]) -> None:
    texts = generate(lm, tokenizer, PROMPTS, goal=goals[0], max_new_tokens=NEW, do_sample=False)
    written = write(lm, tokenizer, PROMPTS, goals[0])
    assert texts == ["".join(f" {WORDS[token]}" for token in row) for row in written]
    bare = generate(lm, tokenizer, PROMPTS, max_new_tokens=NEW, do_sample=False)
    rows = write(lm, tokenizer, PROMPTS, None)
    assert bare == ["".join(f" {WORDS[token]}" for token in row) for row in rows]
    drawn = generate(lm, tokenizer, PROMPTS[:1], goal=goals[0], num_return_sequences=3)
    assert len(drawn) == 3


def test_what_does_not_fit_is_refused(
    lm: Any, tokenizer: Any, hmm: HMM, goals: list[CompiledGoal]
) -> None:
    mask = torch.ones(2, 3)
    attribute = Attribute.from_weights(weights(0))
    other = plain_goal(HMM.random(4, VOCAB), attribute, 3)
    with pytest.raises(InvalidInputError, match="the same HMM"):
        SteeringProcessor([goals[0], other], prompt_mask=mask, max_new_tokens=3)
    with pytest.raises(InvalidInputError, match=r"each of the 2 prompts; the list has 1 items"):
        SteeringProcessor([goals[0]], prompt_mask=mask, max_new_tokens=3)
    with pytest.raises(InvalidInputError, match=r"a Goal is among them\. Compiler\(hmm\)"):
        SteeringProcessor([Goal(attribute)] * 2, prompt_mask=mask, max_new_tokens=3)  # type: ignore[list-item]
    processor = SteeringProcessor(goals[0], prompt_mask=mask, max_new_tokens=3)
    with pytest.raises(InvalidInputError, match="2 prompts of 3 tokens"):
        processor(torch.zeros(2, 2, dtype=torch.long), torch.zeros(2, VOCAB))
    config = HMMConfig(tokenizer_fingerprint="sha256:another")
    named = HMM(hmm.initial, hmm.transition, hmm.emission, config)
    goal = plain_goal(named, attribute, 3)
    with pytest.raises(TokenizerMismatchError):
        generate(lm, tokenizer, PROMPTS, goal=goal)


def test_one_text_instead_of_a_list_is_refused() -> None:
    """A string is a sequence of texts, of one letter each: five prompts for "Hello"."""
    with pytest.raises(InvalidInputError, match="must be a list of texts"):
        generate(object(), object(), "Hello")  # type: ignore[arg-type]
