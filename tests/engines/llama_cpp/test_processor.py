"""llama.cpp is steered with the logits that it computes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("llama_cpp", reason="needs the extra `llama-cpp`")

from llama_cpp import LlamaGrammar, LogitsProcessorList
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from foretrace.attribute import Attribute, AttributeStore
from foretrace.engines.llama_cpp import SteeringProcessor, generate_tokens
from foretrace.errors import InvalidInputError, TokenizerMismatchError
from foretrace.hmm import HMM
from foretrace.steering import CompiledGoal, Request
from foretrace.steering.price import prices
from goals import compiled, steer
from host_goals import KINDS

pytestmark = pytest.mark.llama_cpp

BEGINNINGS = (Path(__file__).parents[1] / "beginnings.txt").read_text("utf-8").splitlines()
EXAMPLES = Path(__file__).parents[3] / "examples"
NEW = 12
GoalOf = Callable[[str], CompiledGoal]


class Recorder:
    """A processor that changes nothing, and records the token ids and logits of every step."""

    def __init__(self) -> None:
        self.steps: list[tuple[list[int], torch.Tensor]] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.steps.append((input_ids.tolist(), torch.from_numpy(np.array(scores))))
        return scores


@pytest.mark.shows("llama.cpp", "greedy", "constraints", "several goals")
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_texts_are_those_of_the_reweighted_logits(
    llm: Any, tokenizer: Any, hmm: HMM, goal_of: GoalOf, kind: str
) -> None:
    """The recorded logits are steered once more, from the token ids alone."""
    goal, changed = goal_of(kind), 0
    steering = SteeringProcessor(llm, goal, max_new_tokens=NEW)
    for text in BEGINNINGS[:8]:
        prompt, recorder = tokenizer(text).input_ids, Recorder()
        request = Request(goal, tuple(prompt), NEW, stop_ids=steering.stop_ids)
        steering.begin()
        tokens = llm.generate(
            prompt, temp=0.0, logits_processor=LogitsProcessorList([recorder, steering])
        )
        for step, token in zip(range(NEW), tokens, strict=False):
            ids, bare = recorder.steps[step]
            assert ids[: len(prompt)] == prompt
            steered = steer(hmm, [request], [ids[len(prompt) :]], bare[None])
            assert token == int(steered.argmax())
            changed += token != int(bare.argmax())
            if token in steering.stop_ids:
                break
    assert changed >= 4
    assert steering.error is None


@pytest.mark.shows("llama.cpp", "sampling")
def test_required_text_occurs_in_sampled_texts(llm: Any, tokenizer: Any, goal_of: GoalOf) -> None:
    """Also at a high temperature, with top-p, and after another text with the same processor."""
    steering = SteeringProcessor(llm, goal_of("required text"), max_new_tokens=NEW)
    options: dict[str, Any] = {"processor": steering, "max_new_tokens": NEW}
    options |= {"temperature": 1.5, "top_p": 0.9}
    texts = []
    for seed in (0, 1, 2, 1):
        tokens = list(generate_tokens(llm, [504, 982], seed=seed, **options))
        texts.append(tokenizer.decode(tokens))
    assert all("lighthouse" in text for text in texts)
    assert texts[1] == texts[3]
    assert len(set(texts)) == 3


def test_temperature_and_top_p_are_those_of_transformers(llm: Any, tokenizer: Any) -> None:
    """The nucleus is that of the distribution at the temperature, not at temperature 1."""
    prompt, recorder = tokenizer("The name of the").input_ids, Recorder()
    next(llm.generate(prompt, temp=0.0, logits_processor=LogitsProcessorList([recorder])))
    ordered, order = (recorder.steps[0][1].double() / 3).softmax(-1).sort(descending=True)
    nucleus = set(order[ordered.cumsum(0) - ordered < 0.3].tolist())
    bare = SteeringProcessor(llm, None, max_new_tokens=1)
    options: dict[str, Any] = {"processor": bare, "max_new_tokens": 1, "temperature": 3.0}
    drawn = {
        next(generate_tokens(llm, prompt, seed=seed, top_p=0.3, **options)) for seed in range(40)
    }
    assert drawn <= nucleus
    assert len(drawn) > 20


@pytest.mark.shows("llama.cpp", "chats", "streaming")
def test_a_completion_streams_and_a_chat_is_answered(llm: Any, goal_of: GoalOf) -> None:
    processor = SteeringProcessor(llm, goal_of("required text"), max_new_tokens=NEW)
    options: dict[str, Any] = {"max_tokens": NEW, "temperature": 0.0}
    options["logits_processor"] = LogitsProcessorList([processor])
    pieces = [
        piece["choices"][0]["text"]
        for piece in llm.create_completion("At the coast we", stream=True, **options)
    ]
    assert len(pieces) > 3
    assert "lighthouse" in "".join(pieces)
    processor.begin()
    messages = [{"role": "user", "content": "What did you see at the coast?"}]
    answer = llm.create_chat_completion(messages, **options)
    assert "lighthouse" in answer["choices"][0]["message"]["content"]
    assert processor.error is None


@pytest.mark.shows("llama.cpp", "structured outputs")
def test_a_grammar_and_a_goal_hold_together(llm: Any, hmm: HMM) -> None:
    """The grammar allows two words, and the goal decides which of them is written."""
    grammar = LlamaGrammar.from_string('root ::= " good" | " bad"', verbose=False)
    attributes = AttributeStore(EXAMPLES / "attributes")
    written = []
    for name in ("positive", "negative"):
        goal = compiled(hmm, attributes[name], 8, 20.0)
        processor = SteeringProcessor(llm, goal, max_new_tokens=8)
        completion = llm.create_completion(
            "In one word, the food was",
            grammar=grammar,
            max_tokens=8,
            temperature=0.0,
            logits_processor=LogitsProcessorList([processor]),
        )
        written.append(completion["choices"][0]["text"])
        assert processor.error is None
    assert written == [" good", " bad"]


def test_the_price_is_that_of_the_library(
    llm: Any, tokenizer: Any, hmm: HMM, goal_of: GoalOf
) -> None:
    goal, seen, expected = goal_of("product"), list[float](), list[float]()
    processor = SteeringProcessor(llm, goal, max_new_tokens=4, on_price=seen.append)
    prompt, recorder = tokenizer("You are such a").input_ids, Recorder()
    tokens = llm.generate(
        prompt, temp=0.0, logits_processor=LogitsProcessorList([recorder, processor])
    )
    generated = [token for _, token in zip(range(4), tokens, strict=False)]
    request = Request(goal, tuple(prompt), 4, stop_ids=processor.stop_ids)
    for step, (_, bare) in enumerate(recorder.steps):
        steered = steer(hmm, [request], [generated[:step]], bare[None])
        expected.append(float(prices(bare[None], steered)))
    assert seen == pytest.approx(expected, abs=1e-5)
    assert max(seen) > 0


def test_an_error_ends_the_text(
    llm: Any, tokenizer: Any, goal_of: GoalOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp calls processors through C, which drops exceptions: no token is left unsteered."""
    processor = SteeringProcessor(llm, goal_of("product"), max_new_tokens=NEW)
    monkeypatch.setattr("sys.unraisablehook", lambda _: None)  # Python prints it here

    def fail(*_: object) -> None:
        raise MemoryError("no memory")

    assert processor.tracker is not None
    monkeypatch.setattr(processor.tracker, "step", fail)
    options: dict[str, Any] = {"max_tokens": NEW, "temperature": 1.0}
    options["logits_processor"] = LogitsProcessorList([processor])
    assert llm.create_completion("You are", **options)["choices"][0]["text"] == ""
    assert isinstance(processor.error, MemoryError)
    with pytest.raises(MemoryError, match="no memory"):
        list(generate_tokens(llm, [5, 6], processor=processor, max_new_tokens=NEW))


def test_an_hmm_of_another_tokenizer_is_refused(llm: Any, hmm: HMM) -> None:
    config = replace(hmm.config, tokenizer_fingerprint="sha256:0")
    other = HMM(hmm.initial, hmm.transition, hmm.emission, config)
    attribute = Attribute.from_weights(torch.ones(hmm.vocab_size))
    with pytest.raises(TokenizerMismatchError, match="The HMM was made with another tokenizer"):
        SteeringProcessor(llm, compiled(other, attribute, 4), max_new_tokens=4)


def test_a_draft_model_is_refused(
    llm: Any, goal_of: GoalOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm, "draft_model", LlamaPromptLookupDecoding())
    with pytest.raises(InvalidInputError, match="Load it without `draft_model`"):
        SteeringProcessor(llm, goal_of("product"), max_new_tokens=4)


def test_a_text_longer_than_the_context_is_refused(llm: Any) -> None:
    processor = SteeringProcessor(llm, None, max_new_tokens=250)
    with pytest.raises(InvalidInputError, match="10 tokens and 250 new tokens do not fit"):
        next(generate_tokens(llm, [5] * 10, processor=processor, max_new_tokens=250))
