"""Answers to chats: the template, and ends of turns, on a tiny LM."""

import gc
import resource
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `transformers`")

from foretrace.attribute import Attribute
from foretrace.chat import as_messages, encode_chat
from foretrace.engines.transformers import encode_prompts, generate, turn_ends
from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM
from foretrace.steering import Compiler, Goal
from goals import compiled
from tiny_lm import chat_tokenizer, tiny_hmm, tiny_model, word_tokenizer

END = 1


def test_chats_and_texts_are_encoded_together() -> None:
    tokenizer, chat = chat_tokenizer(), as_messages("w1 w2")
    encoded = encode_prompts(tokenizer, [chat, "w3", ""])
    assert encoded == [encode_chat(tokenizer, chat), tokenizer("w3").input_ids, [0]]


def test_an_answer_ends_with_its_turn() -> None:
    """The model's own list of ends lacks the token that ends a turn in the template."""
    tokenizer = chat_tokenizer()
    model = tiny_model(tokenizer)
    with torch.no_grad():
        model.lm_head.weight[END] = 0.0  # a likely token: the others' logits vary around 0
        model.lm_head.weight *= 0.1
    chat, ends = as_messages("w1"), turn_ends(tokenizer, [as_messages("w1")])
    assert ends == [END]
    assert turn_ends(tokenizer, ["w1"]) == []
    torch.manual_seed(0)
    answers = generate(model, tokenizer, [chat] * 20, max_new_tokens=200)
    lengths = [len(answer.split()) for answer in answers]
    torch.manual_seed(0)
    texts = generate(model, tokenizer, ["assistant"] * 20, max_new_tokens=200)
    assert sum(lengths) < 0.8 * sum(len(text.split()) for text in texts)


@pytest.mark.shows("transformers generate", "chats")
def test_the_end_of_a_turn_is_neutral() -> None:
    """A goal that every token violates, except the ends, does not end answers early."""
    tokenizer = chat_tokenizer()
    model, hmm = tiny_model(tokenizer), tiny_hmm(tokenizer)
    weights = torch.full((len(tokenizer),), 0.01)
    weights[END] = 1.0  # the HMM does not know that this token ends texts
    goal = compiled(hmm, Attribute.from_weights(weights), 8, 3.0)
    torch.manual_seed(0)
    answers = generate(model, tokenizer, [as_messages("w1")] * 20, goal=goal, max_new_tokens=8)
    assert sum(len(answer.split()) for answer in answers) > 100


def test_a_single_chat_is_refused() -> None:
    tokenizer = chat_tokenizer()
    with pytest.raises(InvalidInputError, match=r"Write \[prompt\]"):
        encode_prompts(tokenizer, as_messages("w1"))  # type: ignore[arg-type]


def test_a_chat_needs_a_template() -> None:
    tokenizer = word_tokenizer()
    with pytest.raises(InvalidInputError, match="no chat template"):
        generate(tiny_model(tokenizer), tokenizer, [as_messages("w1")])


def resident_memory() -> int:
    """Return the bytes of memory that the process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.parametrize("own", [False, True], ids=["one goal", "goals of their own"])
def test_a_thousand_calls_leave_nothing_behind(own: bool) -> None:
    """A goal has tables of 140 kB: if one call in five leaked them, it would show."""
    tokenizer = word_tokenizer()
    model, hmm = tiny_model(tokenizer), HMM.random(2048, len(tokenizer), eos_token_id=0)
    compiler = Compiler(hmm, horizon=16, memory=1 << 20)
    weights = torch.rand(len(tokenizer), generator=torch.Generator().manual_seed(0))
    attribute = Attribute.from_weights(weights)
    goal, sizes = compiler.compile(Goal(attribute, 1.0)), []
    gc.disable()  # reference counts alone must free what is not used
    try:
        for call in range(1_000):
            if own:
                goal = compiler.compile(Goal(attribute, 1.0 + call / 1_000))
            generate(model, tokenizer, ["w1"], goal=goal, max_new_tokens=1)
            if call in (99, 999):
                sizes.append(resident_memory())
    finally:
        gc.enable()
    assert sizes[1] <= 1.03 * sizes[0]
