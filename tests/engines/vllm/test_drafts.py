"""Speculative decoding with model runner V2: drafted tokens are steered as all others."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="needs the environment with vLLM in it")

from foretrace.engines.vllm import SteeringProcessor
from foretrace.engines.vllm.admission import validate_params
from foretrace.engines.vllm.core import RequestEntry
from foretrace.engines.vllm.settings import Settings
from foretrace.errors import InvalidInputError
from foretrace.steering import Steering
from second_runner_process import run_second_runner
from small_server import small_server
from tiny_lm import byte_tokenizer, write_tiny_lm

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

DRAFTS, REQUESTS, PROMPT = 3, 4, 3
TOKENIZER = byte_tokenizer(["hello"], 257)  # one token for each byte
VOCAB_SIZE = len(TOKENIZER)
GOALS: list[dict[str, Any] | None] = [
    {"goal": "kind", "strength": 3},
    {"goal": "a0 & ~kind"},
    {"goal": "a0", "must_contain": "to"},
    {"goal": "kind", "after": "e", "window": 5},
    None,
]


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, any_model: None) -> Iterator[Settings]:
    """Set the environment of a server."""
    with small_server(tmp_path, TOKENIZER) as settings:
        yield settings


class FakeRunner:
    """The steps of runner V2 with made-up drafts, of which a drawn number is accepted."""

    device = torch.device("cpu")
    max_num_reqs = REQUESTS

    def __init__(self, seed: int) -> None:
        self.generator = np.random.default_rng(seed)
        self.prompt_len = SimpleNamespace(np=np.full(REQUESTS, PROMPT))
        self.prefill_len = SimpleNamespace(np=np.full(REQUESTS, PROMPT))
        self.all_token_ids = SimpleNamespace(gpu=torch.zeros(REQUESTS, 128, dtype=torch.int32))
        self.total_len = SimpleNamespace(gpu=torch.zeros(REQUESTS, dtype=torch.int32))
        self.texts = [self.draw(PROMPT) for _ in range(REQUESTS)]
        if seed:
            self.texts[2] = TOKENIZER.encode("to ")  # which the goal of this request requires
        self.commit()

    def draw(self, count: int) -> list[int]:
        return [int(token) for token in self.generator.integers(1, VOCAB_SIZE, count)]

    def commit(self) -> None:
        for index, text in enumerate(self.texts):
            self.all_token_ids.gpu[index, : len(text)] = torch.tensor(text)
            self.total_len.gpu[index] = len(text)

    def step(self, batch: list[int], *, cut: bool = False) -> tuple[Any, list[list[int]]]:
        """Draft tokens; return the context of the step, and the text before each row's token."""
        prefixes: list[list[int]] = []
        requests: list[int] = []
        depths: list[int] = []
        upper = []
        for index in batch:
            text = self.texts[index]
            prefill = int(self.prefill_len.np[index])
            drafts = self.draw(DRAFTS) if len(text) > prefill else []
            drafts = drafts[: int(self.generator.integers(0, DRAFTS + 1))] if cut else drafts
            prefixes += [text + drafts[:depth] for depth in range(len(drafts) + 1)]
            requests += [index] * (len(drafts) + 1)
            depths += range(len(drafts) + 1)
            # With asynchronous scheduling, the host does not know how many drafts were accepted.
            slack = DRAFTS + int(self.generator.integers(0, 3))
            upper.append(prefill if len(text) == prefill else len(text) + slack)
        context = SimpleNamespace(
            idx_mapping_np=np.array(batch),
            expanded_idx_mapping=torch.tensor(requests),
            expanded_local_pos=torch.tensor(depths),
            seq_lens_upper_bound_np=np.array([*upper, 0]),  # padded, as for CUDA graphs
            input_ids=torch.tensor([prefix[-1] for prefix in prefixes], dtype=torch.int32),
            pos=torch.tensor([len(prefix) - 1 for prefix in prefixes]),
        )
        for index in batch:  # accept some, and sample one more
            own = [row for row, owner in enumerate(requests) if owner == index]
            accepted = prefixes[int(self.generator.choice(own))]
            self.texts[index] = accepted + self.draw(1)
        return context, prefixes


def _config(version: int) -> Any:
    return SimpleNamespace(
        use_v2_model_runner=version == 2,
        speculative_config=SimpleNamespace(num_speculative_tokens=DRAFTS),
        model_config=SimpleNamespace(
            max_model_len=128, hf_config=SimpleNamespace(eos_token_id=0), get_vocab_size=lambda: 99
        ),
    )


def _params(goal: dict[str, Any] | None) -> Any:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=64, extra_args=goal)
    validate_params(params)
    return params


@pytest.mark.parametrize("cut", [False, True], ids=["all drafts", "drafts cut"])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_drafted_row_is_steered_as_its_text(seed: int, cut: bool) -> None:
    """Also for requests that begin later, wait for a step, or come in parts of a step."""
    runner = FakeRunner(seed)
    processor: Any = SteeringProcessor(_config(2), runner)
    goals = GOALS[:REQUESTS]
    for index, goal in enumerate(goals[:3]):
        assert processor.add_request(index, _params(goal))
    batches = [[[0, 1]], [[1, 0]], [[0], [1]], [[0, 1, 2]], [[2, 0]], [[2], [0, 1]], [[1, 3, 0]]]
    batches += [[[0, 1, 2, 3]]] * 4
    for parts in batches:
        if 3 in parts[0] and 3 not in processor.entries:
            assert processor.add_request(3, _params(goals[3]))
        processor.apply_staged_writes()
        for batch in parts:
            context, prefixes = runner.step(batch, cut=cut)
            _assert_steered(processor, context, prefixes)
        runner.commit()


def _assert_steered(processor: Any, context: Any, prefixes: list[list[int]]) -> None:
    steered = processor.apply(torch.zeros(len(prefixes), VOCAB_SIZE), context)
    for row, index in enumerate(context.expanded_idx_mapping.tolist()):
        entry = processor.entries[index]
        torch.testing.assert_close(steered[row], _expected(entry, prefixes[row]))


def _expected(entry: RequestEntry, text: list[int]) -> torch.Tensor:
    """Return the steered logits of a request that reads all its text at once."""
    processor: Any = SteeringProcessor(_config(2), FakeRunner(0))
    alone = RequestEntry(entry.params, None, entry.prompt_length, [], 0)
    processor.core.open(alone, resumed=False)
    assert processor.core.load(alone)
    assert alone.request is not None
    steering, logits = Steering(processor.core.hmm), torch.zeros(1, VOCAB_SIZE)
    request = replace(alone.request, prompt=tuple(text[:PROMPT]))
    steering.start({0: request}, {0: text[PROMPT:]})
    steering.reweight_(logits, [0])
    return logits[0]


def test_slots_of_other_requests_and_after_preemption_are_read_again() -> None:
    runner = FakeRunner(0)
    processor: Any = SteeringProcessor(_config(2), runner)
    for index in (0, 1):
        processor.add_request(index, _params(GOALS[index]))
    for step in range(6):
        if step == 2:  # another request in slot 0
            runner.texts[0] = runner.draw(PROMPT)
            processor.add_request(0, _params(GOALS[2]))
        if step == 4:  # preempted: its text is filled in at once
            runner.prefill_len.np[1] = len(runner.texts[1])
            processor.add_request(1, _params(GOALS[1]))
        runner.commit()
        processor.apply_staged_writes()
        context, prefixes = runner.step([0, 1])
        _assert_steered(processor, context, prefixes)


def test_drafts_that_are_not_set_are_no_error() -> None:
    """vLLM marks them by -1, and rejects them; the row before is steered as always."""
    runner = FakeRunner(0)
    processor: Any = SteeringProcessor(_config(2), runner)
    processor.add_request(0, _params(GOALS[0]))
    for _ in range(2):
        runner.commit()
        processor.apply_staged_writes()
        context, prefixes = runner.step([0])
        context.input_ids[1:] = -1
        steered = processor.apply(torch.zeros(len(prefixes), VOCAB_SIZE), context)
        torch.testing.assert_close(steered[0], _expected(processor.entries[0], prefixes[0]))
        runner.texts[0] = prefixes[0] + runner.draw(1)


def test_runner_v1_refuses_drafts() -> None:
    with pytest.raises(InvalidInputError, match="model runner V2"):
        SteeringProcessor(_config(1), torch.device("cpu"), False)


@pytest.mark.parametrize("method", ["synthetic", "fly"])
def test_a_verification_that_ignores_steering_is_refused(method: str) -> None:
    config = _config(2)
    config.speculative_config.rejection_sample_method = method
    with pytest.raises(InvalidInputError, match=f"'{method}' accepts drafted tokens"):
        SteeringProcessor(config, FakeRunner(0))


@pytest.mark.shows("vLLM, runner V2", "speculative decoding")
def test_speculative_decoding_writes_the_same(tmp_path: Path, settings: Settings) -> None:
    """Greedy, with a small LM that repeats itself, so that many drafts are accepted."""
    model = write_tiny_lm(tmp_path / "lm", TOKENIZER, heads=1)
    prompts = [[5, 6, 7, 5, 6, 7], [5, 8, 9, 4], [30, 31], [12, 13, 14], [40, 41, 42]]
    given = [
        {"prompt": prompt, "goal": goal, "max_tokens": 24}
        for prompt, goal in zip(prompts, GOALS, strict=True)
    ]
    plain = run_second_runner(model, given, settings)
    drafted = run_second_runner(model, given, settings, DRAFTS)
    assert drafted["tokens"] == plain["tokens"]
    assert drafted["accepted"] >= 10
