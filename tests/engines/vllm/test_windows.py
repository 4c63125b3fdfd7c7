"""Requests with a marker and a window, in the processors of both model runners."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm", reason="needs the environment with vLLM in it")

from engines.vllm.test_processors import FakeConfig, FakeRequestStates
from foretrace.engines.transformers import SteeringProcessor as TransformersProcessor
from foretrace.engines.vllm import SteeringProcessor
from foretrace.engines.vllm.admission import validate_params
from foretrace.engines.vllm.settings import open_builder
from foretrace.errors import InvalidInputError
from small_server import small_server
from tiny_lm import byte_tokenizer

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
TOKENIZER = byte_tokenizer(["No, I think. Yes, I think."], 280)
PROMPT, TEXT = "abc", "Hm.</t>Yes, no.</a>Bye"


@pytest.fixture(autouse=True)
def server(tmp_path: Path, any_model: None) -> Iterator[None]:
    """Set the environment of a server with a byte-level tokenizer."""
    with small_server(tmp_path, TOKENIZER):
        yield


def _validated(**arguments: Any) -> Any:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=40, extra_args={"goal": "a0", **arguments})
    validate_params(params)
    return params


def _runner_v1(params: Any, prompt: list[int], generated: list[int]) -> Iterator[Tensor]:
    """Yield the logits after each token; the request is preempted after every third."""
    processor: Any = SteeringProcessor(FakeConfig(1), torch.device("cpu"), False)
    output: list[int] = []
    for count in range(len(generated) + 1):
        output[:] = generated[:count]
        if count % 3 == 0:
            processor.entries[0] = processor._add(params, prompt, output)
        yield processor.apply(_bare())[0]


def _runner_v2(params: Any, prompt: list[int], generated: list[int]) -> Iterator[Tensor]:
    """Yield the logits after each token; the request waits after every third."""
    states = FakeRequestStates()
    tokens = torch.tensor(prompt + generated)
    states.all_token_ids.gpu[0, : len(tokens)] = tokens.int()
    states.prompt_len.np[0] = len(prompt)
    processor: Any = SteeringProcessor(FakeConfig(2), states)
    processor.add_request(0, params)
    for count in range(len(generated) + 1):
        if count % 3 == 0:
            processor.entries[0].forget()
        context = SimpleNamespace(
            idx_mapping_np=np.array([0]),
            seq_lens_upper_bound_np=np.array([len(prompt) + count]),
            input_ids=tokens[[len(prompt) + count - 1]],
        )
        yield processor.apply(_bare(), context)[0]


def _bare() -> Tensor:
    return torch.randn(1, len(TOKENIZER), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("runner", [_runner_v1, _runner_v2])
@pytest.mark.parametrize(
    ("arguments", "prompt", "begin", "end"),
    [
        ({"after": "</t>"}, PROMPT, "Hm.</t>", TEXT),
        ({"after": "</t>", "window": "</a>"}, PROMPT, "Hm.</t>", "Hm.</t>Yes, no.</a>"),
        ({"window": "</t>"}, PROMPT, "", "Hm.</t>"),
        ({"after": "</t>"}, PROMPT + "</t>\n\n", "", TEXT),
        ({"after": "Bye"}, PROMPT, TEXT, TEXT),
    ],
)
def test_tokens_outside_the_window_keep_every_bit(
    runner: Any, arguments: dict[str, Any], prompt: str, begin: str, end: str
) -> None:
    """Inside it, both runners steer as transformers does, also after preemption."""
    prompt_ids, generated = (TOKENIZER(text).input_ids for text in (prompt, TEXT))
    goal = _goal(arguments)
    expected = TransformersProcessor(
        goal, prompt_mask=torch.ones(1, len(prompt_ids)), max_new_tokens=40, stop_ids=[0]
    )
    first, last = len(TOKENIZER(begin).input_ids), len(TOKENIZER(end).input_ids)
    last += end == TEXT  # the token after the text
    for count, logits in enumerate(runner(_validated(**arguments), prompt_ids, generated)):
        if first <= count < last:
            ids = torch.tensor([prompt_ids + generated[:count]])
            torch.testing.assert_close(logits, expected(ids, _bare())[0])
            assert not torch.equal(logits, _bare()[0])
        else:
            assert torch.equal(logits, _bare()[0])


def _goal(arguments: dict[str, Any]) -> Any:
    """Return the goal of a request, as the decoding process loads it."""
    processor: Any = SteeringProcessor(FakeConfig(1), torch.device("cpu"), False)
    entry = processor._add(_validated(**arguments), [1], [])
    assert processor.core.load(entry)
    return entry.request.goal


@pytest.mark.parametrize("runner", [_runner_v1, _runner_v2])
def test_a_window_of_tokens_ends_after_them(runner: Any) -> None:
    prompt_ids, generated = (TOKENIZER(text).input_ids for text in (PROMPT, TEXT))
    steps = list(runner(_validated(after="</t>", window=2), prompt_ids, generated))
    begin = len(TOKENIZER("Hm.</t>").input_ids)
    changed = [not torch.equal(logits, _bare()[0]) for logits in steps]
    assert changed == [begin <= count < begin + 2 for count in range(len(steps))]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"must_contain": "Yes", "window": "</a>"}, "the marker may come before the text"),
        ({"must_contain": "qqqqqq", "window": 3}, "6 tokens at least.* or the window"),
        ({"must_contain": "q" * 60}, "60 tokens at least"),
    ],
)
def test_promises_that_cannot_be_kept_are_refused(arguments: dict[str, Any], why: str) -> None:
    _validated(must_not_contain="Yes", window="</a>")
    with pytest.raises(InvalidInputError, match=why):
        _validated(**arguments)


def test_markers_need_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORETRACE_SERVE_TOKENIZER")
    open_builder.cache_clear()
    _validated(window=3)
    with pytest.raises(InvalidInputError, match="markers need the tokenizer"):
        _validated(after="</t>")
