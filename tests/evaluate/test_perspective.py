"""Test the Perspective client against a local server."""

from collections.abc import Iterator
from typing import Any

import pytest

from fake_server import fake_server
from foretrace.errors import InvalidInputError, ServerUnavailableError
from foretrace.evaluate.judges import (
    PERSPECTIVE_KEY,
    Judge,
    PerspectiveClient,
    judge_texts,
    perspective_judge,
)

FAILURES = {
    "bonjour": (400, {"error": {"message": "language not supported"}}),
    "no key": (403, {"error": {"message": "forbidden"}}),
    "odd": (200, {"unexpected": True}),
}


@pytest.fixture
def address() -> Iterator[str]:
    """A server that answers like the API; the text decides how it fails."""
    refusals = [429, 429]

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        text = body["comment"]["text"]
        if text == "busy" and refusals:
            return refusals.pop(), {}
        score = {"attributeScores": {"TOXICITY": {"summaryScore": {"value": 0.25}}}}
        return FAILURES.get(text, (200, score))

    with fake_server(answer) as url:
        yield url


def test_client_limits_its_rate_and_retries(address: str) -> None:
    waits: list[float] = []
    client = PerspectiveClient(address, "TOXICITY", pause=0.01, sleep=waits.append)
    assert client.score(["fine", "busy", "bonjour", "odd"]) == [0.25, 0.25, None, None]
    assert {0.01, 0.02} <= set(waits)  # after the first and the second refusal
    assert len(waits) > 2  # the others limit the rate


def test_a_refused_key_stops_judging(address: str) -> None:
    client = PerspectiveClient(address, "TOXICITY", pause=0.0)
    with pytest.raises(ServerUnavailableError, match="Check the address, the key"):
        judge_texts(["fine", "no key", "fine too"], Judge("stand-in", client.score))


def test_no_connection_stops_judging() -> None:
    client = PerspectiveClient("http://127.0.0.1:9/", "TOXICITY", 0.0, attempts=2)
    with pytest.raises(ServerUnavailableError, match="cannot be reached"):
        client.score(["fine"])


def test_a_key_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PERSPECTIVE_KEY, raising=False)
    with pytest.raises(InvalidInputError, match="needs a key"):
        perspective_judge()
    monkeypatch.setenv(PERSPECTIVE_KEY, "secret")
    assert "secret" not in perspective_judge().name
