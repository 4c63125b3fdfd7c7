"""Test the questions of `benchmarks/kept.py`, and the scores of their options on a tiny LM."""

import sys
from collections import Counter
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `transformers`")

import foretrace as ft
from page_runner import PROJECT
from tiny_lm import tiny_hmm, tiny_model, word_tokenizer

sys.path.insert(0, str(PROJECT / "benchmarks"))

from foretrace.steering import Request, Steering
from questions import questions
from retrospect import score_texts

PROMPT, TEXTS = [0, 5, 6], [[7], [8, 9, 4], [8, 9], [8, 3, 2]]


@pytest.fixture
def lm() -> Any:
    model = tiny_model(word_tokenizer())
    model.train(False)
    return model


def test_there_are_300_questions_with_four_different_options() -> None:
    asked = questions()
    assert len({question.prompt for question in asked}) == len(asked) == 300
    for question in asked:
        assert len(set(question.options)) == 4
        assert all(option.startswith(" ") and option[1:].strip() for option in question.options)
        assert not question.prompt.endswith(" ")
    kinds = Counter(question.kind for question in asked)
    assert (kinds["arithmetic"], len(kinds)) == (150, 9)
    assert asked == questions() != questions(seed=1)


def test_the_first_option_of_arithmetic_is_right_and_the_only_one() -> None:
    for question in questions():
        if question.kind == "arithmetic":
            problem = question.prompt.splitlines()[-1].removesuffix(" =")
            values = [int(option) for option in question.options]
            left, sign, right = problem.split()
            results = {"+": int(left) + int(right), "-": int(left) - int(right)}
            assert values[0] == results.get(sign, int(left) * int(right))
            assert len({len(option) for option in question.options}) == 1


@torch.inference_mode()
def test_texts_have_the_probability_of_their_tokens_one_after_the_other(lm: Any) -> None:
    hmm = tiny_hmm(word_tokenizer())
    attribute = ft.Attribute.from_weights(torch.linspace(0.1, 1, hmm.vocab_size))
    compiler = ft.Compiler(hmm, 8)
    goals = [compiler.compile(ft.Goal(attribute, strength)) for strength in (1.0, 4.0)]
    scores = score_texts(lm, goals, PROMPT, TEXTS, limit=8)
    for column, text in enumerate(TEXTS):
        steering, nats = Steering(hmm), torch.zeros(3)
        steering.start(
            {slot: Request(goal, tuple(PROMPT), 8) for slot, goal in enumerate(goals, 1)}
        )
        for position, token in enumerate(text):
            ids = torch.tensor([[*PROMPT, *text[:position]]])
            logits = lm(ids).logits[0, -1].repeat(3, 1)
            steering.reweight_(logits, [None, 1, 2])
            nats += logits.log_softmax(-1)[:, token]
            if position == 0:
                torch.testing.assert_close(scores.first, logits.log_softmax(-1))
            steering.advance([None, 1, 2], torch.full((3,), token))
        torch.testing.assert_close(scores.texts[:, column], nats)
    assert (scores.texts[0] != scores.texts[1]).any()
