"""What a client cannot do to a server of others, over HTTP."""

import http.client
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

pytest.importorskip("vllm", reason="needs the environment with vLLM in it")

from foretrace.engines.vllm.middleware import REFUSAL_DELAY
from server import API_KEY, HOSTILE_KEY, RealServer

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


class Answer(NamedTuple):
    """An HTTP response, and how long it took."""

    status: int
    headers: dict[str, str]
    body: str
    seconds: float


def _post(
    address: str,
    body: bytes | Iterator[bytes],
    path: str = "/v1/completions",
    key: str | None = API_KEY,
) -> Answer:
    headers = {"Content-Type": "application/json"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=120)
    began = time.perf_counter()
    try:
        connection.request("POST", path, body, headers, encode_chunked=not isinstance(body, bytes))
        response = connection.getresponse()
        text = response.read().decode()
        seconds = time.perf_counter() - began
        names = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, names, text, seconds)
    finally:
        connection.close()


def _completion(goal: str, **more: Any) -> bytes:
    request = {"model": "lm", "prompt": "One day", "max_tokens": 2, **more}
    return json.dumps({**request, "vllm_xargs": {"goal": goal}}).encode()


def test_a_request_without_the_key_builds_nothing(real_server: RealServer) -> None:
    before = real_server.built()
    for key in (None, "guessed"):
        answer = _post(real_server.address, _completion("a0 & a1 & ~a2"), key=key)
        assert answer.status == 401
    time.sleep(1)
    assert real_server.built() == before


@pytest.mark.parametrize("declared", [True, False])
def test_a_large_body_is_refused_at_once(real_server: RealServer, declared: bool) -> None:
    _post(real_server.address, _completion("a0"))  # warm
    piece = b" " * (1 << 20)
    seconds, waits = [], []
    for _ in range(3):  # the quickest counts: others may use the machine
        body = piece * 100 if declared else iter([piece] * 100)
        with ThreadPoolExecutor(1) as pool:
            refused = pool.submit(_post, real_server.address, body)
            others = [_post(real_server.address, _completion("a0")) for _ in range(3)]
        assert refused.result().status == 413
        assert "at most 32 MB" in refused.result().body
        assert [answer.status for answer in others] == [200] * 3
        seconds.append(refused.result().seconds)
        waits.append(max(answer.seconds for answer in others))
    assert min(seconds) < 1
    assert min(waits) < 2


def test_no_route_and_no_escape_avoids_the_queue(real_server: RealServer) -> None:
    before = real_server.built()
    for path in ("/invocations", "/inference/v1/generate"):
        body = json.loads(_completion("a1 & a2"))
        extra = {"extra_args": body["vllm_xargs"], "max_tokens": 2}
        other = {"token_ids": [1, 2], "sampling_params": extra}
        answer = _post(real_server.address, json.dumps({**body, **other}).encode(), path)
        assert answer.status in (400, 404), answer
    assert real_server.built() == before
    escaped = _completion("a1 & a2").replace(b"vllm_xargs", b"vllm_xarg\\u0073")
    assert _post(real_server.address, escaped).status == 200
    assert len(real_server.built() - before) == 1  # by the worker, as any other
    answer = _post(real_server.address, _completion("a1 & a2"), "/invocations")
    assert answer.status == 200  # it needs no build any more


def test_a_refusal_is_cheap(real_server: RealServer) -> None:
    long = " & ".join(f'contains("{letter * 12}")' for letter in "abcdefghijklmnop")
    goals = [_completion(f"{long} & a{i}") for i in range(2)]
    answers = [_post(real_server.address, goal, key=HOSTILE_KEY) for goal in goals]
    assert [answer.status for answer in answers] == [400, 400]
    assert max(answer.seconds for answer in answers) < 1.0


def test_a_client_that_sends_new_goals_slows_nobody_else(real_server: RealServer) -> None:
    """200 new expressions as fast as they can be sent, beside a client with a known goal."""
    address = real_server.address

    def latency() -> float:
        answer = _post(address, _completion("a0", max_tokens=16))
        assert answer.status == 200
        return answer.seconds

    def attack(i: int) -> Answer:
        goal = f'a{i % 3} & ~contains("never {i} again, and once more {i}")'
        return _post(address, _completion(goal, max_tokens=1), key=HOSTILE_KEY)

    latency()
    quiet = median(latency() for _ in range(10))
    with ThreadPoolExecutor(16) as pool:
        hostile = [pool.submit(attack, i) for i in range(200)]
        busy = [latency()]
        while not all(future.done() for future in hostile) or len(busy) < 10:
            busy.append(latency())
        answers = [future.result() for future in hostile]
    assert {answer.status for answer in answers} <= {200, 429}
    refused = [answer for answer in answers if answer.status == 429]
    assert len(refused) > 100
    assert all(answer.seconds >= REFUSAL_DELAY for answer in refused)
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    assert median(busy) <= 1.5 * quiet, (quiet, busy)
