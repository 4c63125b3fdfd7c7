"""The processors of both model runners, without a server."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="needs the environment with vLLM in it")

from foretrace.attribute import Attribute
from foretrace.engines.transformers import SteeringProcessor as TransformersProcessor
from foretrace.engines.vllm import SteeringProcessor, metrics
from foretrace.engines.vllm.admission import validate_params
from foretrace.engines.vllm.params import ADMISSION
from foretrace.engines.vllm.processor import SteeringProcessorV1, SteeringProcessorV2
from foretrace.errors import InvalidInputError
from foretrace.steering.price import prices
from small_server import small_server
from tiny_lm import WORDS, word_tokenizer

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


class FakeConfig:
    """The parts of vLLM's config that the processors read."""

    speculative_config = None

    def __init__(self, version: int) -> None:
        self.use_v2_model_runner = version == 2
        self.model_config = SimpleNamespace(
            max_model_len=64, hf_config=SimpleNamespace(eos_token_id=0), get_vocab_size=lambda: 99
        )


class FakeRequestStates:
    """The buffers of runner V2, on the host: four slots of 64 tokens, prompts of 3."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.all_token_ids = SimpleNamespace(gpu=torch.ones(4, 64, dtype=torch.int32))
        self.prompt_len = SimpleNamespace(np=np.full(4, 3))
        self.prefill_len = SimpleNamespace(np=np.full(4, 3))
        self.total_len = SimpleNamespace(gpu=torch.full((4,), 3))


@pytest.fixture(autouse=True)
def server(tmp_path: Path, any_model: None) -> Iterator[None]:
    """Set the environment of a server."""
    with small_server(tmp_path, word_tokenizer(), has_bytes=False):
        yield


def _params(**extra: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=8, extra_args={"goal": "a0", **extra})


def _validated(**extra: Any) -> Any:
    params = _params(**extra)
    validate_params(params)
    return params


def test_the_class_of_the_runner_is_created() -> None:
    assert isinstance(
        SteeringProcessor(FakeConfig(1), torch.device("cpu"), False), SteeringProcessorV1
    )
    assert isinstance(SteeringProcessor(FakeConfig(2), FakeRequestStates()), SteeringProcessorV2)


def test_validation_can_be_repeated_with_other_arguments() -> None:
    params = _params()
    validate_params(params)
    assert params.extra_args[ADMISSION]["stops"] == [0]
    assert 0 in params.all_stop_token_ids
    params.extra_args = {key: params.extra_args[key] for key in params.extra_args if key != "goal"}
    validate_params(params)
    assert ADMISSION not in params.extra_args
    assert params.stop_token_ids == []
    assert params.all_stop_token_ids == set()


def test_the_same_object_sent_again_keeps_its_own_stop_tokens() -> None:
    from vllm import SamplingParams

    params = SamplingParams(stop_token_ids=[5], extra_args={"goal": "a0"})
    for _ in range(2):
        validate_params(params)
        assert params.stop_token_ids == [5, 0]
        assert params.all_stop_token_ids == {5, 0}


def test_structured_outputs_with_required_texts_are_refused(tmp_path: Path) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    occurs = Attribute.contains("b", [b"a", b"b", *[b""] * (len(WORDS) - 2)])
    occurs.save(tmp_path / "attributes" / "occurs.safetensors")
    schema = StructuredOutputsParams(json={"type": "object"})
    validate_params(SamplingParams(extra_args={"goal": "a0"}, structured_outputs=schema))
    validate_params(SamplingParams(extra_args={"goal": "occurs"}))
    params = SamplingParams(extra_args={"goal": "a0 & occurs"}, structured_outputs=schema)
    with pytest.raises(InvalidInputError, match="structured outputs"):
        validate_params(params)


def _step(processor: Any, slots: list[int], length: int) -> torch.Tensor:
    tokens = processor.request_states.all_token_ids.gpu
    context = SimpleNamespace(
        idx_mapping_np=np.array(slots),
        seq_lens_upper_bound_np=np.full(len(slots) + 1, length),  # padded, as for CUDA graphs
        input_ids=tokens[slots, length - 1],
    )
    processor.apply_staged_writes()
    steered: torch.Tensor = processor.apply(torch.zeros(len(slots), len(WORDS)), context)
    return steered


def test_finished_requests_of_runner_v2_hold_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    processor: Any = SteeringProcessor(FakeConfig(2), FakeRequestStates())
    for slot in (0, 1):
        assert processor.add_request(slot, _validated())
    assert not processor.add_request(2, _plain())
    _step(processor, [0, 1, 2], 3)
    _step(processor, [1, 2], 4)
    steered = _step(processor, [1, 2], 5)
    assert list(processor.entries) == [1]
    assert processor.waiting[0].request is None
    for length in (6, 7, 8):  # request 1 waits
        _step(processor, [2], length)
    assert not processor.entries
    with monkeypatch.context() as patched:
        patched.setattr(processor, "_steer", None)  # plain requests cost nothing
        _step(processor, [2], 9)
    assert torch.equal(_step(processor, [1, 2], 5), steered)
    assert list(processor.entries) == [1]


def _plain() -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=8)


def test_a_request_that_was_not_checked_is_ended(caplog: pytest.LogCaptureFixture) -> None:
    processor: Any = SteeringProcessor(FakeConfig(2), FakeRequestStates())
    assert processor.add_request(0, _params())
    assert _step(processor, [0], 3).softmax(-1)[0, 0] == 1.0  # token 0 ends a text
    assert "was not checked" in caplog.text


@pytest.mark.parametrize(
    "arguments",
    [
        {"goal": "kind", "strength": 4},
        {"goal": "kind & a0"},
        {"goal": ["~kind", "a0"], "strength": [2, 5], "neutral_end": 0},
        {"goal": "a0", "transform": [3, -1]},
    ],
)
def test_both_runners_steer_as_transformers_does(arguments: dict[str, Any]) -> None:
    params, prompt, generated = _params(**arguments), [5, 6, 7], [8, 9, 8, 3]
    validate_params(params)
    first: Any = SteeringProcessor(FakeConfig(1), torch.device("cpu"), False)
    output: list[int] = []
    first.entries[0] = first._add(params, prompt, output)
    states = FakeRequestStates()
    states.all_token_ids.gpu[0, :7] = torch.tensor(prompt + generated)
    second: Any = SteeringProcessor(FakeConfig(2), states)
    second.add_request(0, params)
    first.core.load(first.entries[0])
    goal = first.entries[0].request.goal
    expected = TransformersProcessor(
        goal, prompt_mask=torch.ones(1, 3), max_new_tokens=8, stop_ids=[0]
    )
    for length in range(len(generated) + 1):
        output[:] = generated[:length]
        logits = expected(torch.tensor([prompt + output]), torch.zeros(1, len(WORDS)))
        torch.testing.assert_close(first.apply(torch.zeros(1, len(WORDS))), logits)
        torch.testing.assert_close(_step(second, [0], 3 + length), logits)
    assert bool((logits != 0).any())


def test_the_price_is_counted_every_128_steps() -> None:
    processor: Any = SteeringProcessor(FakeConfig(2), FakeRequestStates())
    processor.add_request(0, _validated(strength=5))
    nats, tokens = metrics.PRICE._value.get(), metrics.PRICED._value.get()
    for _ in range(metrics.STEPS_BETWEEN_READS - 1):
        steered = _step(processor, [0], 3)
    assert metrics.PRICED._value.get() == tokens
    _step(processor, [0], 3)
    measured = metrics.STEPS_BETWEEN_READS // metrics.STEPS_BETWEEN_PRICES
    assert metrics.PRICED._value.get() == tokens + measured
    price = float(prices(torch.zeros_like(steered), steered))
    assert metrics.PRICE._value.get() - nats == pytest.approx(measured * price, rel=1e-4)


def test_a_resumed_request_is_counted_once() -> None:
    states = FakeRequestStates()
    processor: Any = SteeringProcessor(FakeConfig(2), states)
    before = metrics.REQUESTS._value.get()
    processor.add_request(0, _validated())
    states.prefill_len.np[0] = 5  # the prompt and two tokens, after preemption
    processor.add_request(0, _validated())
    assert metrics.REQUESTS._value.get() == before + 1


def test_placeholders_of_asynchronous_scheduling_are_replaced_before_steering() -> None:
    """vLLM fills in the token that was sampled last, in the list that the processor holds.

    Asynchronous scheduling needs a GPU: the function of vLLM's runner V1 runs here by itself.
    """
    from vllm.v1.worker.gpu_input_batch import InputBatch

    params, prompt = _params(), [5, 6, 7]
    validate_params(params)
    output = [8, -1]
    batch = SimpleNamespace(
        sampling_metadata=SimpleNamespace(output_token_ids=[output]),
        sampled_token_ids_cpu=torch.tensor([[9]]),
        prev_req_id_to_index={"a": 0},
        req_ids=["a"],
        async_copy_ready_event=SimpleNamespace(synchronize=lambda: None),
    )
    InputBatch.update_async_output_token_ids(batch)
    assert output == [8, 9]
    steered = []
    for tokens in (output, [8, 9]):
        processor: Any = SteeringProcessor(FakeConfig(1), torch.device("cpu"), False)
        processor.entries[0] = processor._add(params, prompt, tokens)
        steered.append(processor.apply(torch.zeros(1, len(WORDS))))
    assert torch.equal(*steered)


def test_a_placeholder_that_is_left_ends_the_request(caplog: pytest.LogCaptureFixture) -> None:
    params, output = _params(), [8]
    validate_params(params)
    processor: Any = SteeringProcessor(FakeConfig(1), torch.device("cpu"), False)
    processor.entries[0] = processor._add(params, [5, 6, 7], output)
    processor.apply(torch.zeros(1, len(WORDS)))
    output.append(-1)
    steered = processor.apply(torch.zeros(1, len(WORDS)))
    assert steered.softmax(-1)[0, 0] == 1.0  # token 0 ends a text
    assert "--no-async-scheduling" in caplog.text
    assert [vars(record)["goal"] for record in caplog.records] == [params.extra_args["goal"]]
