"""Test the Perspective client against a local server."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest

from foretrace.errors import InvalidInputError
from foretrace.evaluate.judges import (
    PERSPECTIVE_KEY,
    Judge,
    JudgeRefusedError,
    PerspectiveClient,
    judge_texts,
    perspective_judge,
)


class FakePerspective(BaseHTTPRequestHandler):
    """A server that answers like the API; the text decides how it fails."""

    refusals = 0

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["comment"]["text"]
        kind = type(self)
        if text == "busy" and kind.refusals < 2:
            kind.refusals += 1
            self._respond(429, {})
        elif text == "bonjour":
            self._respond(400, {"error": {"message": "language not supported"}})
        elif text == "no key":
            self._respond(403, {"error": {"message": "forbidden"}})
        elif text == "odd":
            self._respond(200, {"unexpected": True})
        else:
            self._respond(200, {"attributeScores": {"TOXICITY": {"summaryScore": {"value": 0.25}}}})

    def _respond(self, code: int, content: dict[str, Any]) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@pytest.fixture
def address() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), FakePerspective)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def test_client_limits_its_rate_and_retries(address: str) -> None:
    waits: list[float] = []
    client = PerspectiveClient(address, "TOXICITY", pause=0.01, sleep=waits.append)
    assert client.score(["fine", "busy", "bonjour", "odd"]) == [0.25, 0.25, None, None]
    assert {0.01, 0.02} <= set(waits)  # after the first and the second refusal
    assert len(waits) > 2  # the others limit the rate


def test_a_refused_key_stops_judging(address: str) -> None:
    client = PerspectiveClient(address, "TOXICITY", pause=0.0)
    with pytest.raises(JudgeRefusedError, match="refuses the key"):
        judge_texts(["fine", "no key", "fine too"], Judge("stand-in", client.score))


def test_no_connection_gives_no_score() -> None:
    client = PerspectiveClient("http://127.0.0.1:9/", "TOXICITY", 0.0, attempts=2)
    assert client.score(["fine"]) == [None]


def test_a_key_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PERSPECTIVE_KEY, raising=False)
    with pytest.raises(InvalidInputError, match="needs a key"):
        perspective_judge()
    monkeypatch.setenv(PERSPECTIVE_KEY, "secret")
    assert "secret" not in perspective_judge().name
