"""Measure the cost of steering: `generate` with and without it, alternating in one run.

Measures the paper's size (a GPT-2-large-shaped LM with random weights and an HMM of 4,096 states
with 1% of its emission stored) and SmolLM2 with the HMM of `examples/`, also with a context reward
of rank 16. For comparison, it measures a dense emission. With --quick, it measures only SmolLM2.
Every step reweights the full vocabulary, so the sampling method makes no difference. Prompts have
12 tokens; their filtering is included. The time to the first token is that of a single step after a
prompt of 512 tokens.
"""

import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LogitsProcessorList

from foretrace import HMM, Attribute, CompiledGoal, Compiler, Goal
from foretrace.attribute import ContextReward
from foretrace.context import Head, Probe
from foretrace.engines.transformers import SteeringProcessor
from harness import Report, options, paired, seconds
from inference import dense_hmm, sparse_emission
from smollm2 import find_smollm2

EXAMPLE = Path(__file__).parent.parent / "examples" / "smollm2-135m"
PROMPT, LONG_PROMPT, HORIZON, ATTRIBUTE_TOKENS, RANK = 12, 512, 64, 5000, 16


def main() -> None:
    """Run the benchmark."""
    arguments = options(__doc__)
    report = Report("Decoding: steered / bare")
    smollm2 = AutoModelForCausalLM.from_pretrained(find_smollm2(), dtype=torch.float32)
    hmm = HMM.from_pretrained(EXAMPLE)
    for batch in (1, 32):
        _compare("SmolLM2, 1,024 states", smollm2, hmm, batch, arguments.quick, report, goal=1.08)
        name, context = "SmolLM2, 1,024 states, context reward", Probe.build(Head.of_model(smollm2))
        _compare(name, smollm2, hmm, batch, arguments.quick, report, goal=None, probe=context)
    name = f"SmolLM2, 1,024 states, first token after {LONG_PROMPT}"
    _compare(name, smollm2, hmm, 1, arguments.quick, report, goal=None, prompt=LONG_PROMPT, new=1)
    _table("1,024 states", hmm, report, goal=None)
    if not arguments.quick:
        config = GPT2Config(n_embd=1280, n_layer=36, n_head=20)
        large: Any = GPT2LMHeadModel(config)
        large.eval()
        dense = dense_hmm(config.vocab_size)
        emission = sparse_emission(config.vocab_size, density=0.01)
        hmm = HMM(dense.initial, dense.transition, emission)
        for batch in (1, 8):
            name = "GPT-2 large, 4,096 states"
            _compare(name, large, hmm, batch, arguments.quick, report, goal=1.04)
            _compare(f"{name}, naive", large, dense, batch, arguments.quick, report, goal=None)
        _table("4,096 states", hmm, report, goal=0.5)
        _table("4,096 states, naive", dense, report, goal=None)
    report.publish(arguments.json)


class Timed(SteeringProcessor):
    """A processor that measures its own time, which other load on the machine disturbs less."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seconds: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Steer, and record the time."""
        start = perf_counter()
        steered = super().__call__(input_ids, scores)
        self.seconds.append(perf_counter() - start)
        return steered


def random_attribute(hmm: HMM) -> Attribute:
    """Return an attribute with random weights on random tokens."""
    weights = torch.ones(hmm.vocab_size)
    random = torch.Generator().manual_seed(0)
    chosen = torch.randperm(hmm.vocab_size, generator=random)[:ATTRIBUTE_TOKENS]
    weights[chosen] = torch.rand(ATTRIBUTE_TOKENS, generator=random)
    return Attribute.from_weights(weights)


def random_context(probe: Probe) -> ContextReward:
    """Return a random context reward, so small that no step reaches the largest price."""
    width, random = len(probe.inverse), torch.Generator().manual_seed(0)
    readers, writers = (
        0.01 * torch.randn(RANK, columns, generator=random) for columns in (width + 1, width)
    )
    return ContextReward(readers, writers, probe.config.fingerprint)


def compile_goal(
    hmm: HMM, attribute: Attribute, strength: float = 2.0, probe: Probe | None = None
) -> CompiledGoal:
    """Compile a goal. Nothing is kept, so that each call builds the tables."""
    return Compiler(hmm, HORIZON, probe).compile(Goal(attribute, strength))


def _compare(
    name: str,
    lm: Any,
    hmm: HMM,
    batch: int,
    quick: bool,
    report: Report,
    *,
    goal: float | None,
    probe: Probe | None = None,
    prompt: int = PROMPT,
    new: int | None = None,
) -> None:
    """Generate the same number of tokens with and without steering, alternating.

    With a probe, the goal has a context reward.
    """
    new_tokens = new or (20 if not quick else 8 if batch == 1 else 3)
    ids = torch.randint(3, hmm.vocab_size, (batch, prompt))
    mask = torch.ones_like(ids)
    context = None if probe is None else random_context(probe)
    target = compile_goal(hmm, random_attribute(hmm).with_context(context), probe=probe)

    def generate(processors: list[SteeringProcessor]) -> None:
        lm.generate(
            ids,
            attention_mask=mask,
            logits_processor=LogitsProcessorList(processors),
            do_sample=True,
            top_k=0,
            top_p=0.9,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            pad_token_id=0,
        )

    processor = Timed(target, prompt_mask=mask, max_new_tokens=new_tokens)
    pairs = 3 if quick or goal is None else 10 if batch == 1 else 6
    bare, ratio = paired(lambda: generate([]), lambda: generate([processor]), pairs)
    starts = range(0, new_tokens * (pairs + 1), new_tokens)
    calls = [sum(processor.seconds[start : start + new_tokens]) for start in starts]
    inside = median(calls[1:])  # the first is a warm-up
    report.add(f"{name}, batch {batch}: bare", 1e3 * bare / new_tokens, "ms/step")
    report.add(f"{name}, batch {batch}: steered / bare", ratio, "", at_most=goal)
    report.add(f"{name}, batch {batch}: inside the processor / bare", inside / bare, "")


def _table(name: str, hmm: HMM, report: Report, *, goal: float | None) -> None:
    attribute = random_attribute(hmm)
    (duration,) = seconds(lambda: compile_goal(hmm, attribute), repeats=3)
    label = f"lookahead of {ATTRIBUTE_TOKENS:,} tokens, {HORIZON} ahead"
    report.add(f"{name}: {label}", duration, "s", at_most=goal)


if __name__ == "__main__":
    main()
