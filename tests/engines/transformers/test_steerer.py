"""The Steerer: goals in every form, prices, bare texts, chats and streams, on a tiny LM."""

import re
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `transformers`")

from docs_folder import docs_tokenizer
from foretrace.attribute import Attribute, AttributeStore, ContextReward
from foretrace.chat import as_messages
from foretrace.context import Head
from foretrace.engines.transformers import Steerer, generate
from foretrace.errors import InvalidInputError, TokenizerMismatchError, UnknownNameError
from foretrace.hmm import HMM, HMMConfig
from foretrace.steering import Goal
from tiny_lm import tiny_hmm, tiny_model

TOKENIZER = docs_tokenizer()
MODEL, HMM_OF_LM = tiny_model(TOKENIZER), tiny_hmm(TOKENIZER)
SIZE = len(TOKENIZER)
EARLY = Attribute.from_rewards(torch.linspace(2, -2, SIZE), name="early")
LIGHT = Attribute.from_weights(torch.linspace(0.5, 1, SIZE), name="light")
ODD = Attribute.from_rewards(torch.arange(SIZE) % 2 - 0.5, name="odd")
ATTRIBUTES = {one.name: one for one in (EARLY, LIGHT, ODD)}


@pytest.fixture(scope="module")
def steerer() -> Steerer:
    return Steerer(MODEL, TOKENIZER, HMM_OF_LM, ATTRIBUTES)


def test_a_text_comes_with_its_price_and_its_probabilities(steerer: Steerer) -> None:
    goal = "early & ~odd"
    options: dict[str, Any] = {"max_new_tokens": 12, "seed": 3}
    result = steerer.generate("hello", goal, level="strong", bare=True, **options)
    assert result.price > 0
    assert list(result.probabilities) == ["early", "odd"]
    assert 0 < result.probabilities["odd"] < 0.5 < result.probabilities["early"] < 1
    assert result.bare == steerer.generate("hello", **options).text != result.text
    assert steerer.generate("hello", goal, level="mild", **options).price < result.price
    with pytest.raises(FrozenInstanceError):
        result.price = 0.0  # type: ignore[misc]


def test_all_forms_of_a_goal_give_the_same_text(steerer: Steerer) -> None:
    goals: list[str | Attribute | Goal] = ["early", EARLY, Goal(EARLY, 2.0)]
    results = [steerer.generate("hello", goal, strength=2.0, max_new_tokens=8) for goal in goals]
    assert results[0] == results[1] == results[2]
    compiled = steerer.compiler.compile(Goal(EARLY, 2.0))
    torch.manual_seed(0)
    (expected,) = generate(
        MODEL, TOKENIZER, ["hello"], goal=compiled, max_new_tokens=8, temperature=1.0
    )
    assert results[0].text == expected


@pytest.mark.parametrize("goal", [None, "light", LIGHT, Goal(LIGHT, 1.0, window=20)])
def test_required_and_forbidden_texts(
    steerer: Steerer, goal: str | Attribute | Goal | None
) -> None:
    result = steerer.generate(
        "hello", goal, must_contain="lighthouse", must_not_contain=["a", "e "], max_new_tokens=20
    )
    before, _, after = result.text.partition("lighthouse")
    assert "lighthouse" in result.text
    assert "a" not in before + after
    assert list(result.probabilities) == ([] if goal is None else ["light"])


def test_words_in_any_case(steerer: Steerer) -> None:
    result = steerer.generate(
        "hello",
        'contains("light", whole_word=True)',
        must_contain="HOUSE",
        must_not_contain=["Lighthouse", "e"],
        whole_words=True,
        ignore_case=True,
        max_new_tokens=20,
    )
    assert re.search(r"\blight\b", result.text)
    words = re.findall(r"\w+", result.text.lower())
    assert "house" in words
    assert not {"lighthouse", "e"} & set(words)


def test_each_prompt_has_its_goal(steerer: Steerer) -> None:
    prompts = ["hello", "the other driver", ""]
    results = steerer.generate(prompts, ["early", LIGHT, None], max_new_tokens=6, bare=True)
    assert [list(one.probabilities) for one in results] == [["early"], ["light"], []]
    assert [one.price > 0 for one in results] == [True, True, False]
    assert results[2].text == results[2].bare


def test_goals_are_compiled_once(steerer: Steerer) -> None:
    steerer.generate("hello", "early", max_new_tokens=1)
    size = steerer.compiler.nbytes
    steerer.generate("hello", "early", max_new_tokens=1)
    assert steerer.compiler.nbytes == size


def test_chats(steerer: Steerer) -> None:
    chat = as_messages("hello")
    one = steerer.chat(chat, "early", max_new_tokens=6)
    both = steerer.chat([chat, as_messages("sir")], ["early", None], max_new_tokens=6)
    assert one.price > 0
    assert [text.price > 0 for text in both] == [True, False]
    with pytest.raises(InvalidInputError, match="generate` continues texts"):
        steerer.chat("hello", "early")  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", ["hello", as_messages("hello")], ids=["text", "chat"])
def test_a_stream_has_the_same_text(steerer: Steerer, prompt: Any) -> None:
    pieces = list(steerer.stream(prompt, "early", max_new_tokens=8))
    run = steerer.generate if isinstance(prompt, str) else steerer.chat
    assert len(pieces) > 2
    assert "".join(pieces) == run(prompt, "early", max_new_tokens=8).text


def test_a_closed_stream_stops_generating(steerer: Steerer) -> None:
    stream = steerer.stream("hello", "early", max_new_tokens=100_000)
    next(stream)
    stream.close()  # waits for the thread


def test_a_processor_steers_a_loop(steerer: Steerer) -> None:
    ids = torch.tensor([TOKENIZER("hello").input_ids])
    processor = steerer.processor(
        "early", prompt_mask=torch.ones_like(ids), max_new_tokens=4, strength=2.0
    )
    with torch.inference_mode():
        for _ in range(4):
            steered = processor(ids, MODEL(ids).logits[:, -1])
            ids = torch.cat([ids, steered.argmax(-1, keepdim=True)], 1)
    text = steerer.generate("hello", EARLY, strength=2.0, temperature=0, max_new_tokens=4).text
    assert TOKENIZER.decode(ids[0]) == "hello" + text


def test_without_an_hmm_and_with_folders(tmp_path: Path) -> None:
    AttributeStore(tmp_path / "attributes").add(EARLY)
    HMM_OF_LM.save_pretrained(tmp_path / "hmm")
    for hmm, states in ((None, 1), (tmp_path / "hmm", HMM_OF_LM.num_states)):
        made = Steerer(MODEL, TOKENIZER, hmm, tmp_path / "attributes")
        assert made.compiler.hmm.num_states == states
        assert made.generate("hello", "early", max_new_tokens=2).price > 0


def test_the_probe_is_built_for_context_rewards_alone() -> None:
    made = Steerer(MODEL, TOKENIZER, HMM_OF_LM, ATTRIBUTES)
    made.generate("hello", "early", max_new_tokens=1)
    assert made.compiler.probe is None
    head = Head.of_model(MODEL, TOKENIZER)
    reward = ContextReward(torch.ones(1, 33), torch.ones(1, 32), head.fingerprint)
    made.generate("hello", EARLY.with_context(reward), max_new_tokens=2)
    assert made.compiler.probe is not None


@pytest.mark.parametrize("attributes", ["folder", "store", "mapping"])
def test_a_misspelt_name_gets_a_suggestion(tmp_path: Path, attributes: str) -> None:
    AttributeStore(tmp_path).add(EARLY)
    forms: dict[str, Any] = {
        "folder": str(tmp_path),
        "store": AttributeStore(tmp_path),
        "mapping": ATTRIBUTES,
    }
    made = Steerer(MODEL, TOKENIZER, HMM_OF_LM, forms[attributes])
    mask = torch.ones(1, 1)
    for call in (
        lambda: made.generate("hello", "earyl"),
        lambda: made.chat(as_messages("hello"), "earyl"),
        lambda: list(made.stream("hello", "earyl")),
        lambda: made.processor("earyl", prompt_mask=mask, max_new_tokens=1),
    ):
        with pytest.raises(UnknownNameError, match="Did you mean early"):
            call()


@pytest.mark.parametrize(
    ("goal", "options", "message"),
    [
        (["early", "light"], {}, "2 goals for 1 prompts"),
        (3, {}, "not a int"),
        ("early &", {}, "not an expression"),
        ("early", {"level": "huge"}, "huge"),
        ("early", {"strength": -1.0}, "negate it"),
        (None, {"must_contain": "lighthouses", "max_new_tokens": 1}, "Raise the limit"),
        ('contains("a")', {"must_not_contain": "A", "ignore_case": True}, "contradict each other"),
    ],
)
def test_errors_say_what_to_do(
    steerer: Steerer, goal: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        steerer.generate("hello", goal, **options)


def test_an_hmm_of_another_tokenizer_is_refused() -> None:
    config = HMMConfig(eos_token_ids=(0,), tokenizer_fingerprint="0" * 16)
    other = HMM(HMM_OF_LM.initial, HMM_OF_LM.transition, HMM_OF_LM.emission, config)
    with pytest.raises(TokenizerMismatchError):
        Steerer(MODEL, TOKENIZER, other)
