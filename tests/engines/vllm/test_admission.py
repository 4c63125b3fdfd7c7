"""Requests whose parameters contradict each other are refused; texts that lack something count."""

import asyncio
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="needs the environment with vLLM in it")

from engines.vllm.test_processors import FakeConfig, FakeRequestStates
from foretrace.engines.vllm import SteeringProcessor, metrics
from foretrace.engines.vllm.admission import (
    LOAD_RATE,
    LoadRate,
    SteeringMiddleware,
    _Keys,
    validate_params,
)
from foretrace.engines.vllm.params import ADMISSION
from foretrace.engines.vllm.table_store import GoalSize
from foretrace.errors import InvalidInputError
from small_server import small_server
from tiny_lm import byte_tokenizer

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
TOKENIZER = byte_tokenizer(["hello"], 257)  # one token for each byte
A, B, C = (TOKENIZER(letter).input_ids[0] for letter in "abc")


@pytest.fixture(autouse=True)
def server(tmp_path: Path, any_model: None) -> Iterator[None]:
    """Set the environment of a server."""
    with small_server(tmp_path, TOKENIZER):
        yield


def _params(args: dict[str, Any], **options: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**{"max_tokens": 8, **options}, extra_args=args)


MUST, MUST_NOT = {"must_contain": "ab"}, {"must_not_contain": "ab"}
EITHER = {"goal": 'contains("ab", "cc")'}


@pytest.mark.parametrize(
    ("args", "options"),
    [
        (MUST, {"max_tokens": 1}),
        (MUST | {"window": 1}, {}),
        (MUST, {"stop": "ab"}),
        (MUST, {"stop": ["x", "a"]}),
        (MUST, {"stop": "a", "include_stop_str_in_output": True}),
        (MUST, {"bad_words": ["b"]}),
        (EITHER, {"bad_words": ["b", "c"]}),
        (MUST, {"allowed_token_ids": [A, C]}),
        (MUST, {"allowed_token_ids": [0, A]}),
        (MUST, {"stop_token_ids": [B]}),
        ({"must_not_contain": ["a", "b"]}, {"allowed_token_ids": [A, B]}),
        ({"goal": "kind", "transform": [2, 0]}, {}),
    ],
)
def test_what_cannot_be_met_is_refused(args: dict[str, Any], options: dict[str, Any]) -> None:
    before = metrics.REFUSED._value.get()
    with pytest.raises(InvalidInputError):
        validate_params(_params(args, **options))
    assert metrics.REFUSED._value.get() == before + 1


@pytest.mark.parametrize(
    ("args", "options"),
    [
        (MUST, {"stop": "c"}),
        (MUST, {"stop": "ab", "include_stop_str_in_output": True}),
        (MUST, {"stop": "ab", "min_tokens": 4}),
        (MUST, {"bad_words": ["c", "abc"]}),
        (EITHER, {"bad_words": ["b"]}),
        (MUST, {"allowed_token_ids": [A, B]}),
        (MUST, {"stop_token_ids": [C]}),
        (MUST_NOT, {"allowed_token_ids": [A, B]}),
        (MUST_NOT, {"bad_words": ["ab"], "stop": ["ab"]}),
        ({"must_not_contain": ["a", "b"]}, {"allowed_token_ids": [0, A, B]}),
        ({"goal": "a0"}, {"allowed_token_ids": [A], "stop": "a", "bad_words": ["b"]}),
    ],
)
def test_what_can_be_met_is_admitted(args: dict[str, Any], options: dict[str, Any]) -> None:
    params = _params(args, **options)
    validate_params(params)
    assert ADMISSION in params.extra_args


def _texts() -> list[tuple[dict[str, Any], dict[str, Any], list[int], int]]:
    """Return arguments, options, a text, and whether it lacks something."""
    end = 0
    return [
        (MUST, {}, [C, A, B, end], 0),
        (MUST, {}, [C, C, end], 1),
        (MUST, {}, [A, C, B, C, A, C, B, C], 1),  # the limit
        (MUST, {}, [A], 0),  # cancelled or preempted
        (MUST, {"stop": "cc"}, [A, C, C], 1),
        (MUST, {"stop": "cc"}, [A, C, A], 0),
        (MUST_NOT, {}, [A, C, B, end], 0),
        (MUST_NOT, {}, [A, B, end], 1),
        (MUST | {"window": 2}, {}, [C, A, B, end], 1),
        (MUST | {"after": "c"}, {}, [A, A, end], 0),
        ({"goal": "a0"}, {}, [A, end], 0),
    ]


@pytest.mark.parametrize(("args", "options", "text", "unmet"), _texts())
@pytest.mark.parametrize("version", [1, 2])
def test_a_text_that_ends_without_required_text_is_counted_and_logged_once(
    args: dict[str, Any],
    options: dict[str, Any],
    text: list[int],
    unmet: int,
    version: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    params = _params(args, **options)
    validate_params(params)
    before = metrics.UNMET._value.get()
    run = _run_v1 if version == 1 else _run_v2
    run(params, text)
    assert metrics.UNMET._value.get() == before + 2 * unmet
    assert len([one for one in caplog.messages if "without required text" in one]) == unmet


def _run_v1(params: Any, text: list[int]) -> None:
    """Generate a text twice, in two rows."""
    from vllm.v1.sample.logits_processor import BatchUpdate

    processor: Any = SteeringProcessor(FakeConfig(1), torch.device("cpu"), False)
    outputs: list[list[int]] = [[], []]
    added = [(row, params, [A], output) for row, output in enumerate(outputs)]
    processor.update_state(BatchUpdate(2, removed=[], added=added, moved=[]))
    processor.apply(torch.zeros(2, len(TOKENIZER)))
    for output in outputs:
        output.extend(text)
    processor.update_state(BatchUpdate(0, removed=[0, 1], added=[], moved=[]))
    assert not processor.entries


def _run_v2(params: Any, text: list[int]) -> None:
    states = FakeRequestStates()
    processor: Any = SteeringProcessor(FakeConfig(2), states)
    for index in (0, 1):
        processor.add_request(index, params)
    context = SimpleNamespace(
        idx_mapping_np=np.array([0, 1]),
        seq_lens_upper_bound_np=np.array([3, 3]),
        input_ids=torch.tensor([A, A]),
    )
    processor.apply_staged_writes()
    processor.apply(torch.zeros(2, len(TOKENIZER)), context)
    states.all_token_ids.gpu[:2, 3 : 3 + len(text)] = torch.tensor(text, dtype=torch.int32)
    states.total_len.gpu[:2] = 3 + len(text)
    processor.apply_staged_writes()
    processor.apply_staged_writes()
    assert not processor.entries


def test_tables_are_loaded_at_a_bounded_rate() -> None:
    async def main() -> list[float]:
        rate, began, ends = LoadRate(1 << 40), monotonic(), []
        size = GoalSize(1, LOAD_RATE // 10, None, False, False)
        for key in "abcdeab":
            await rate.wait([key], [size])
            ends.append(monotonic() - began)
        return ends

    ends = asyncio.run(main())
    assert ends[1] < 0.1  # a quarter of a second's worth at once
    assert ends[4] > 0.2
    assert ends[6] - ends[4] < 0.05  # these are loaded already


@pytest.mark.parametrize("source", ["option", "environment", "none"])
def test_keys_are_those_that_vllm_takes(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request that vLLM answers has a client, and equal keys are one client."""
    from fastapi import FastAPI
    from fastapi.testclient import TestClient
    from vllm.entrypoints.serve.middleware.register import init_entrypoints_middleware

    app, clients = FastAPI(root_path="/root"), []
    app.post("/v1/completions")(lambda: "answered")
    monkeypatch.setenv("VLLM_API_KEY", "one" if source == "environment" else "")
    options: dict[str, Any] = {
        "api_key": ["one", "two"] if source == "option" else None,
        "middleware": [],
    }
    options |= {"allowed_origins": ["*"], "allowed_methods": ["*"], "allowed_headers": ["*"]}
    options |= {"allow_credentials": False, "enable_request_id_headers": False}
    init_entrypoints_middleware(Namespace(**options), app, ())
    keys = _Keys(app)

    class Seen:
        """Notes the client of each request, before vLLM checks the key."""

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                assert keys.are_required(scope)
                clients.append(keys.client(scope))
            await self.inner(scope, receive, send)

    app.add_middleware(Seen)
    client = TestClient(app)
    headers = ["Bearer one", "bearer one", "BEARER one", "Bearer two", "Bearer three", "Bearer"]
    headers += ["Bearer  one", "Basic one", "one", "Bearer one ", "Bearer\tone", "Bearer \xe9", ""]
    answered = []
    for header in headers:
        sent = {b"Authorization": header.encode("latin-1")} if header else {}
        answered.append(client.post("/v1/completions", headers=sent).status_code == 200)
    assert [one is not None for one in clients] == answered
    assert len({*clients} - {None}) == {"option": 2, "environment": 1, "none": 1}[source]
    assert answered.count(True) == {"option": 4, "environment": 3, "none": 13}[source]


def test_the_server_starts_when_its_process_can_build() -> None:
    ready: list[bool] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        ready.append(middleware.worker._is_ready)

    middleware = SteeringMiddleware(app)
    try:
        asyncio.run(middleware({"type": "lifespan"}, None, None))  # type: ignore[arg-type]
    finally:
        middleware.worker.stop()
    assert ready == [True]
