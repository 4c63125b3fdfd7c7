"""Context rewards in `generate`: the LM's own hidden states decide, or none."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs the extra `transformers`")

from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from foretrace.attribute import Attribute, ContextReward
from foretrace.attribute.terms import Terms
from foretrace.context import Head, Probe
from foretrace.engines.host import HostProcessor
from foretrace.engines.transformers import SteeringProcessor
from foretrace.engines.transformers.calibration import TOLERANCE, SteeredRuns, calibrate
from foretrace.hmm import HMM
from foretrace.lookahead.levels import BUDGETS
from foretrace.steering import CompiledGoal, Compiler, Goal
from tiny_lm import WORDS, tiny_hmm, word_tokenizer

NEW, WIDTH = 6, 32
PROMPTS = torch.tensor([[0, 0, 5, 6], [9, 8, 7, 3], [0, 11, 12, 13]])
MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]])


@pytest.fixture(scope="module")
def hmm() -> HMM:
    return tiny_hmm(word_tokenizer())


@pytest.fixture(scope="module")
def probe(model: PreTrainedModel) -> Probe:
    return Probe.build(Head.of_model(model), source="tiny")


@pytest.fixture(scope="module")
def reward(probe: Probe) -> ContextReward:
    generator = torch.Generator().manual_seed(0)
    readers = 0.2 * torch.randn(3, WIDTH + 1, generator=generator)
    writers = 0.2 * torch.randn(3, WIDTH, generator=generator)
    return ContextReward(readers, writers, probe.config.fingerprint)


@pytest.fixture(scope="module")
def goal(hmm: HMM, probe: Probe, reward: ContextReward) -> CompiledGoal:
    """The context reward alone: the lookahead changes nothing."""
    attribute = Attribute(Terms.one(), context=reward)
    return Compiler(hmm, NEW, probe).compile(Goal(attribute, 1.0, neutral_end=False))


def rewards_of(model: PreTrainedModel, ids: Tensor, mask: Tensor, reward: ContextReward) -> Tensor:
    """Return the context rewards of all tokens, from the LM's own hidden states: (n, V)."""
    mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    with torch.inference_mode():
        output = model(ids, attention_mask=mask, position_ids=positions, output_hidden_states=True)
    states = torch.nn.functional.pad(output.hidden_states[-1][:, -1], (0, 1), value=1.0)
    head = model.get_output_embeddings().weight.detach()
    rewards: Tensor = (states @ reward.readers.T) @ reward.writers @ (head - head.mean(0)).T
    rewards[:, 0] = 0.0  # the end of a text
    return rewards


class Recorder(LogitsProcessor):
    """Records what a processor receives and returns."""

    def __init__(self, processor: SteeringProcessor) -> None:
        self.processor, self.steps = processor, list[tuple[Tensor, Tensor, Tensor]]()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        before = scores.clone()
        steered = self.processor(input_ids, scores)
        self.steps.append((input_ids.clone(), before, steered.clone()))
        return steered


def write(model: PreTrainedModel, goal: CompiledGoal, **options: Any) -> Recorder:
    processor = SteeringProcessor(goal, prompt_mask=MASK, max_new_tokens=NEW)
    recorder = Recorder(processor)
    model.generate(  # type: ignore[operator]
        PROMPTS,
        attention_mask=MASK,
        max_new_tokens=NEW,
        pad_token_id=0,
        do_sample=False,
        logits_processor=LogitsProcessorList([recorder]),
        **options,
    )
    return recorder


SOME, MANY = [50, 55, 60], list(range(30, 60))
CASES: dict[str, tuple[dict[str, Any], bool]] = {  # and whether states are readable
    "greedy": ({}, True),
    "beam search": ({"num_beams": 2}, True),
    "some suppressed": ({"suppress_tokens": SOME}, True),
    "some biased": ({"sequence_bias": [[[token], 4.0] for token in SOME]}, True),
    "many suppressed": ({"suppress_tokens": MANY}, False),
    "many biased": ({"sequence_bias": [[[token], 4.0] for token in MANY]}, False),
}


@pytest.mark.shows("transformers generate", "context rewards")
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_rewarded_by_the_states_of_the_lm_or_not_at_all(
    case: str, model: PreTrainedModel, goal: CompiledGoal, reward: ContextReward
) -> None:
    """Processors of transformers run before, and may change the logits of the probe's tokens."""
    options, is_readable = CASES[case]
    recorder = write(model, goal, **options)
    beams = options.get("num_beams", 1)
    mask = MASK.repeat_interleave(beams, 0)
    for ids, before, steered in recorder.steps:
        rewards = rewards_of(model, ids, mask, reward)
        assert rewards.std() > 0.1
        expected = (before + rewards if is_readable else before).softmax(-1)
        torch.testing.assert_close(steered.softmax(-1), expected, atol=2e-3, rtol=0)
    tracker = recorder.processor.tracker
    assert tracker is not None
    expected_count = 0 if is_readable else len(PROMPTS) * len(recorder.steps)
    assert tracker.steering.unreadable == expected_count


@pytest.mark.shows("host", "context rewards")
def test_engines_on_the_host_are_steered_the_same(
    model: PreTrainedModel, goal: CompiledGoal
) -> None:
    recorder = write(model, goal)
    processor = HostProcessor(goal, max_new_tokens=NEW)
    for ids, before, steered in recorder.steps:
        found = processor(ids[1].numpy(), before[1].numpy())
        torch.testing.assert_close(torch.from_numpy(found), steered[1], atol=1e-4, rtol=1e-4)


def test_levels_cost_their_budgets(
    model: PreTrainedModel, hmm: HMM, probe: Probe, reward: ContextReward
) -> None:
    words = torch.linspace(-0.5, 0.5, len(WORDS))
    runs = SteeredRuns(model, [[5, 6, 7], [8], [9, 10]], ends=[0], max_new_tokens=8)
    for evidence in (Attribute(Terms.one()), Attribute.from_rewards(words)):
        attribute = evidence.with_context(reward)
        levels = calibrate(runs, hmm, attribute, {"strong": BUDGETS["strong"]}, probe=probe)
        assert levels["strong"].price == pytest.approx(BUDGETS["strong"], rel=TOLERANCE)
