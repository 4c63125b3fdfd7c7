"""Test the client of servers with OpenAI's interface, against a local one that fails on demand."""

from typing import Any

import pytest

from fake_server import chat_answer, fake_server
from foretrace import _http
from foretrace.chat import as_messages
from foretrace.chat_server import KEY, ChatServer
from foretrace.errors import InvalidInputError, ServerError, ServerUnavailableError

HELLO = as_messages("hello")


def test_a_request_has_the_chat_the_options_and_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: list[dict[str, Any]] = []

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        bodies.append(body)
        return chat_answer("hi", finished=False, first_token={"hi": -0.5})

    with fake_server(answer) as url:
        for key in (None, "secret"):
            monkeypatch.delenv(KEY, raising=False)
            if key:
                monkeypatch.setenv(KEY, key)
            server = ChatServer(f"{url}/v1/", "my-lm")
            assert server.answer(HELLO, max_tokens=3) == ("hi", False, {"hi": -0.5})
            assert "secret" not in repr(server)
    asked = {"model": "my-lm", "messages": HELLO, "max_tokens": 3, "path": "/v1/chat/completions"}
    assert bodies == [{**asked, "key": None}, {**asked, "key": "Bearer secret"}]


def test_temporary_failures_are_repeated_with_longer_pauses() -> None:
    statuses = [429, 503, 200]
    waits: list[float] = []
    with fake_server(lambda _: (statuses.pop(0), chat_answer("hi")[1])) as url:
        assert ChatServer(url, "lm", sleep=waits.append).answer(HELLO).text == "hi"
    assert waits == [0.5, 1.0]


@pytest.mark.parametrize(
    ("status", "content", "error", "message"),
    [
        (401, {"error": {"message": "bad key"}}, ServerUnavailableError, "bad key.*Check"),
        (404, b"no page", ServerUnavailableError, "404 .*no page"),
        (400, {"error": "odd"}, ServerError, "answered 400"),
        (500, {}, ServerError, "answered 500"),
        (302, {"location": "http://127.0.0.1:9/"}, ServerError, "answered 302"),
        (200, b"<html>", ServerError, "did not answer with JSON"),
        (200, {"choices": []}, ServerError, "without a message"),
        (200, b" " * (_http.MAX_ANSWER + 1), ServerError, "more than"),
    ],
)
def test_a_failure_says_what_happened(
    status: int, content: Any, error: type[Exception], message: str
) -> None:
    with fake_server(lambda _: (status, content)) as url:
        server = ChatServer(url, "lm", attempts=2, sleep=lambda _: None)
        with pytest.raises(error, match=message):
            server.answer(HELLO)


def test_a_server_that_cannot_be_reached() -> None:
    server = ChatServer("http://127.0.0.1:9/v1", "lm", attempts=2, sleep=lambda _: None)
    with pytest.raises(ServerUnavailableError, match="cannot be reached"):
        server.answer_all([HELLO] * 20)
    with pytest.raises(InvalidInputError, match="no address"):
        ChatServer("localhost:8000", "lm")


def test_failed_requests_are_none_unless_all_fail() -> None:
    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        text = body["messages"][0]["content"]
        return (400, {}) if text == "bad" else chat_answer(f"{text} {body['seed']}")

    with fake_server(answer) as url:
        server = ChatServer(url, "lm")
        answers = server.answer_all([as_messages(text) for text in ("a", "bad", "b")], seed=5)
        assert [answer and answer.text for answer in answers] == ["a 5", None, "b 7"]
        with pytest.raises(ServerUnavailableError, match="No request was answered"):
            server.answer_all([as_messages("bad")] * 8)
