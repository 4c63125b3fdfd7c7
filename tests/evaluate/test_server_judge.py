"""Test a judge that asks a server, against a local one that answers by rule."""

import math
from typing import Any

import pytest

from fake_server import chat_answer, fake_server
from foretrace.chat_server import ChatServer
from foretrace.evaluate import judge_texts
from foretrace.evaluate.server_judge import server_judge

QUESTION = "Is this text formal?"


def test_the_score_is_the_probability_of_yes() -> None:
    candidates = {"Yes": math.log(0.5), " yes": math.log(0.1), "No": math.log(0.2), "Well": -3.0}
    asked = []

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        asked.append(body["messages"][0]["content"])
        first = {"Hm": 0.0} if "odd" in asked[-1] else candidates
        return chat_answer("Yes", first_token=first if body["logprobs"] else None)

    with fake_server(answer) as url:
        judge = server_judge(ChatServer(url, "lm"), QUESTION)
        judged = judge_texts(["Dear Sir", "odd"], judge)
    assert judged.scores == [pytest.approx(0.75), None]
    assert judged.last_failure == "it gave no score"
    assert f"{QUESTION}\n\nText: Dear Sir\n\nAnswer with yes or no only." in asked


@pytest.mark.parametrize("refuses", [False, True])
def test_without_log_probabilities_the_score_is_a_number(refuses: bool) -> None:
    answers = {
        "a": "85",
        "b": "<think>From 0 to 100, maybe 10.</think> I say 30/100.",
        "c": "From 0 to 100, I would say 70.",
        "d": "Formal.",
        "e": "850",
        "f": "-3",
    }

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        if refuses and "logprobs" in body:
            return 400, {}
        return chat_answer(answers.get(body["messages"][0]["content"][:1], "Yes"))

    with fake_server(answer) as url:
        judge = server_judge(ChatServer(url, "lm"), "{text} - is it formal?")
        assert judge.score(list(answers)) == [0.85, 0.3, 0.7, None, None, None]
