"""What a client cannot do to a server of others, over HTTP, with an API key and without."""

import http.client
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from threading import Event, Thread
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

pytest.importorskip("vllm", reason="needs the environment with vLLM in it")

from foretrace.engines.vllm.admission import REFUSAL_DELAY
from server import API_KEY, HOSTILE_KEY, RealServer

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

ROUTES = ("/tokenize", "/invocations", "/v1/completions", "/v1/chat/completions")
GUARDED = ROUTES[2:]
ATTEMPTS = 5  # others may use the machine
ALLOWED_DELAY = 0.05  # seconds, beyond what vLLM itself takes to read a body


class Answer(NamedTuple):
    """An HTTP response, and how long it took."""

    status: int
    headers: dict[str, str]
    body: str
    seconds: float


def _connect(address: str) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(urlsplit(address).netloc, timeout=120)


def _post(
    address: str,
    body: bytes | Iterator[bytes],
    path: str = "/v1/completions",
    key: str | None = API_KEY,
    scheme: str = "Bearer",
) -> Answer:
    headers = {"Content-Type": "application/json"}
    if key is not None:
        headers["Authorization"] = f"{scheme} {key}"
    connection = _connect(address)
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


def _body(args: dict[str, Any], path: str = "/v1/completions", **more: Any) -> bytes:
    request: dict[str, Any] = {"model": "lm", "max_tokens": 2, **more, "vllm_xargs": args}
    if "chat" in path:
        request["messages"] = [{"role": "user", "content": "Hi"}]
    else:
        request["prompt"] = "One day"
    return json.dumps(request).encode()


def _completion(goal: str, **more: Any) -> bytes:
    return _body({"goal": goal}, **more)


@contextmanager
def _health(address: str) -> Iterator[list[float]]:
    """Ask whether the server is alive, again and again, and list the seconds of each answer."""
    seconds: list[float] = []
    done, connection = Event(), _connect(address)

    def ask() -> None:
        while not done.is_set():
            began = time.perf_counter()
            connection.request("GET", "/health")
            connection.getresponse().read()
            seconds.append(time.perf_counter() - began)
            time.sleep(0.002)

    thread = Thread(target=ask)
    thread.start()
    try:
        yield seconds
    finally:
        done.set()
        thread.join()
        connection.close()


def _delay(address: str, body: bytes, path: str, key: str | None) -> tuple[Answer, float]:
    """Send a request; return the answer, and the longest time of a health check meanwhile."""
    with _health(address) as seconds:
        answer = _post(address, body, path, key)
    return answer, max(seconds, default=0.0)


HOSTILE = {
    "many texts": {"must_contain": [f"t{i}" for i in range(40_000)]},
    "a long marker": {"goal": "a0", "after": "a" * 10_000_000},
    "a long text": {"must_contain": "é" * 5_000_000},
    "many copies": {"must_contain": ["t"] * 128},
    "many goals": {"goal": ["a0"] * 100_000},
    "texts within the limit of bytes": {"must_contain": [f"t{i}" for i in range(5_000)]},
    "nested": {"goal": "~(" * 20_000},
}


@pytest.mark.parametrize("args", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_body_delays_nobody_and_is_refused(
    real_server: RealServer, args: dict[str, Any]
) -> None:
    """Compared with the same body for another plugin, which foretrace leaves alone."""
    address, before = real_server.address, real_server.built()
    for path in ROUTES:
        body = _body(args, path)
        other = body.replace(b"must_contain", b"must_cont_in").replace(b'"goal"', b'"g_al"')
        other = other.replace(b'"after"', b'"aft_r"')
        for key in (None, API_KEY):
            for _ in range(ATTEMPTS):
                answer, delay = _delay(address, body, path, key)
                plain, allowed = _delay(address, other, path, key)
                if delay <= allowed + ALLOWED_DELAY:
                    break
            assert delay <= allowed + ALLOWED_DELAY, (path, key, delay, allowed)
            if key is None and path in GUARDED:
                assert (answer.status, plain.status) == (401, 401)
            elif path != "/tokenize":
                assert (answer.status, plain.status) == (400, 200), answer
                assert len(json.loads(answer.body)["error"]["message"]) < 300
    assert real_server.built() == before
    assert real_server.leases() == 0


def test_without_the_key_nothing_is_done_or_told(real_server: RealServer) -> None:
    address = real_server.address
    assert _post(address, _completion("a0")).status == 200  # its table exists
    before = real_server.built()
    goals: list[dict[str, Any]] = [
        {"goal": "a0"},
        {"goal": "a00"},
        {"goal": "a1 & ~a0"},
        {"goal": "a0", "after": "never seen"},
        {"must_contain": "t"},
    ]
    messages = set()
    for key, args in ((key, args) for key in (None, "guessed") for args in goals):
        for path in GUARDED:
            assert _post(address, _body(args, path), path, key).status == 401
        assert _post(address, _body(args, "/tokenize"), "/tokenize", key).status == 200
        answer = _post(address, _body(args), "/invocations", key)
        assert answer.status == 400
        messages.add(answer.body)
    (message,) = messages
    assert "API key" in message
    beam = _completion("a0", use_beam_search=True, n=2)
    assert _post(address, beam, "/invocations", None).status == 400
    assert _post(address, _body({"other": 1}), "/invocations", None).status == 200
    time.sleep(0.5)
    assert real_server.built() == before
    assert real_server.leases() == 0


def test_with_the_key_every_route_that_generates_is_steered(real_server: RealServer) -> None:
    address = real_server.address
    for path, goal in (("/invocations", "a1 & a2"), ("/v1/chat/completions", "a0 & a2")):
        before = real_server.built()
        assert _post(address, _body({"goal": goal}, path), path).status == 200
        assert len(real_server.built() - before) == 1
    before = real_server.built()
    params = {"max_tokens": 2, "extra_args": {"goal": "~a2", "strength": 1}}
    body = json.dumps({"model": "lm", "token_ids": [1, 2], "sampling_params": params}).encode()
    assert _post(address, body, "/inference/v1/generate").status == 200
    assert len(real_server.built() - before) == 1
    copies = _post(address, _body({"must_contain": ["t"] * 64}, max_tokens=8))
    assert copies.status == 200
    assert "t" in json.loads(copies.body)["choices"][0]["text"]


@pytest.mark.parametrize("path", GUARDED)
def test_what_would_be_ignored_is_refused(real_server: RealServer, path: str) -> None:
    """Beam search, other encodings, and options that cut required text off."""
    address = real_server.address
    refused = [
        _body({"goal": "a0"}, path, use_beam_search=True, n=2),
        _body({"goal": "a0"}, path).decode().encode("utf-16"),
        _body({"goal": "a0"}, path).replace(b"vllm_xargs", b"vllm_xarg\\u0073"),
        _body({"goal": "a0", "strength": True}, path),
        _body({"must_contain": "refund"}, path, max_tokens=20, stop="fun"),
        _body({"must_contain": "refund"}, path, max_tokens=20, allowed_token_ids=[100, 101]),
        _body({"must_contain": "refund"}, path, max_tokens=20, bad_words=["refund"]),
    ]
    for body in refused:
        answer = _post(address, body, path)
        assert answer.status == 400, (body, answer)
        assert len(json.loads(answer.body)["error"]["message"]) < 300


@pytest.mark.parametrize("declared", [True, False])
def test_a_large_body_is_refused_at_once(real_server: RealServer, declared: bool) -> None:
    piece = b" " * (1 << 20)
    seconds = []
    for _ in range(3):  # the quickest counts: others may use the machine
        body = piece * 100 if declared else iter([piece] * 100)
        refused = _post(real_server.address, body)
        assert refused.status == 413
        assert "at most 32 MB" in refused.body
        seconds.append(refused.seconds)
    assert min(seconds) < 1


def test_a_disk_that_is_full_is_the_servers_fault(real_server: RealServer) -> None:
    """HTTP 503, and nothing is left behind; the folder is a file meanwhile."""
    folder = real_server.store
    hidden = folder.with_name("hidden")
    folder.rename(hidden)
    folder.write_bytes(b"")
    try:
        answer = _post(real_server.address, _completion("a0 & a1 & ~a2"))
    finally:
        folder.unlink()
        hidden.rename(folder)
    assert answer.status == 503
    assert "Retry" in answer.headers or "retry-after" in answer.headers
    assert not list(folder.glob(".incomplete-*"))
    assert _post(real_server.address, _completion("a0 & a1 & ~a2")).status == 200


def test_markers_stop_no_stream(real_server: RealServer) -> None:
    """16 markers of 200 bytes at once, which are compiled for seconds, beside a plain stream."""
    address, before = real_server.address, real_server.built()

    def attack(marker: str) -> int:
        return _post(address, _body({"goal": "a0", "after": marker}), key=HOSTILE_KEY).status

    for attempt in "ab":  # others may use the machine
        quiet = max(_longest_gap(address) for _ in range(5))
        with ThreadPoolExecutor(16) as pool:
            hostile = [pool.submit(attack, f"{attempt}{i:04}" * 40) for i in range(16)]
            gaps = [_longest_gap(address)]
            while not all(future.done() for future in hostile):
                gaps.append(_longest_gap(address))
        assert {future.result() for future in hostile} <= {200, 429}
        if max(gaps) <= 3 * quiet:
            break
    assert len(real_server.built() - before) >= 4
    assert max(gaps) <= 3 * quiet, (quiet, gaps)


def _longest_gap(address: str) -> float:
    """Stream a plain text; return the longest time between two of its tokens."""
    request = {"model": "lm", "prompt": "One day", "max_tokens": 40, "ignore_eos": True}
    connection = _connect(address)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {API_KEY}"}
    connection.request("POST", "/v1/completions", json.dumps({**request, "stream": True}), headers)
    response = connection.getresponse()
    times = [time.perf_counter() for line in response if line.startswith(b"data: ")]
    connection.close()
    assert len(times) > 30
    return max(after - before for before, after in pairwise(times))


def test_a_client_that_sends_new_goals_slows_nobody_else(real_server: RealServer) -> None:
    """120 new expressions as fast as they can be sent, beside a client with a known goal.

    The hostile client spells the scheme of its key in different ways, and is one client.
    """
    address = real_server.address

    def latency() -> float:
        answer = _post(address, _completion("a0", max_tokens=16))
        assert answer.status == 200
        return answer.seconds

    def attack(i: int) -> Answer:
        goal = f'a{i % 3} & ~contains("never {i} again, and once more {i}")'
        scheme = "".join(
            letter.upper() if i >> bit & 1 else letter for bit, letter in enumerate("bearer")
        )
        return _post(address, _completion(goal, max_tokens=1), key=HOSTILE_KEY, scheme=scheme)

    latency()
    quiet = median(latency() for _ in range(10))
    with ThreadPoolExecutor(48) as pool:
        hostile = [pool.submit(attack, i) for i in range(120)]
        busy = [latency()]
        while not all(future.done() for future in hostile) or len(busy) < 10:
            busy.append(latency())
        answers = [future.result() for future in hostile]
    assert {answer.status for answer in answers} <= {200, 429}
    refused = [answer for answer in answers if answer.status == 429]
    assert len(refused) > 60
    assert all(answer.seconds >= REFUSAL_DELAY for answer in refused)
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    assert median(busy) <= 1.5 * quiet, (quiet, busy)
