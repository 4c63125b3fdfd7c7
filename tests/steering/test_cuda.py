"""A step on a GPU, of which there is a fake one: it never waits, and its operations are few."""

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fake_cuda import DeviceIndexing
from fake_cuda_step import count_step
from foretrace.attribute import Attribute, ContextReward
from foretrace.context import Head, Probe
from foretrace.hmm import HMM
from foretrace.steering import Compiler, Goal, Marker, Request, Steering
from foretrace.steering.batch_index import Kernels

TOKENS, STATES, WIDTH = 64, 8, 12
TOKEN_BYTES = [b"a", b"b", b"c", *[b""] * (TOKENS - 3)]
MARKER = Marker("ab", TOKEN_BYTES)


def drawn(seed: int) -> torch.Tensor:
    return torch.rand(TOKENS, generator=torch.Generator().manual_seed(seed))


def product(seed: int) -> Attribute:
    return Attribute.from_weights(drawn(seed))


def rewards(seed: int) -> Attribute:
    return Attribute.from_rewards(drawn(seed) - 0.5)


def union(seed: int) -> Attribute:
    return product(seed) | product(seed + 10_000)


HEAD = Head(torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(0)), softcap=30.0)


def context(seed: int) -> Attribute:
    values = drawn(seed).expand(4, TOKENS)
    reward = ContextReward(values[:, : WIDTH + 1], values[:, -WIDTH:], HEAD.fingerprint)
    return rewards(seed).with_context(reward)


def constrained(seed: int) -> Attribute:
    text = "abc"[seed % 3] + "ab"[seed // 3 % 2]
    return Attribute.contains(text, TOKEN_BYTES) & product(seed)


ATTRIBUTES = {
    "product": product,
    "rewards": rewards,
    "context": context,
    "union": union,
    "constrained": constrained,
}
LIMITS = {"product": 94, "rewards": 150, "context": 190, "union": 121, "constrained": 284}


def steering_of(
    make: Callable[[int], Attribute], rows: int, distinct: int, marker: Marker | None = None
) -> Steering:
    """Return a steering of rows that share a number of distinct goals."""
    hmm = HMM.random(STATES, TOKENS, eos_token_id=TOKENS - 1)
    steering = Steering(hmm, kernels=Kernels.for_device(torch.device("cuda")))
    compiler = Compiler(hmm, 3, Probe.build(HEAD))
    goals = [compiler.compile(Goal(make(seed), 1.0, after=marker)) for seed in range(distinct)]
    steering.start({row: Request(goals[row % distinct], (1,), 99) for row in range(rows)})
    return steering


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_the_operations_of_a_step_depend_on_no_number(name: str) -> None:
    """Neither on the number of rows nor of goals: 1 to 1,024 rows, 1 and 256 goals."""
    counts = set()
    for rows, distinct in ((1, 1), (8, 1), (64, 1), (256, 256), (1024, 256)):
        advancing, reweighting, _ = count_step(steering_of(ATTRIBUTES[name], rows, distinct), rows)
        counts.add(len(advancing.names) + len(reweighting.names))
    (count,) = counts
    assert count <= LIMITS[name]


def test_goals_without_context_pay_nothing_for_it() -> None:
    counts = [len(count_step(steering_of(rewards, 8, 2), 8)[1].names)]
    steering = steering_of(context, 8, 2)
    counts.append(len(count_step(steering, 8)[1].names))
    goal = Compiler(steering.hmm, 3).compile(Goal(rewards(5), 1.0))
    steering.start({row: Request(goal, (1,), 99) for row in range(8)})
    counts.append(len(count_step(steering, 8)[1].names))
    assert counts[0] == counts[2] < counts[1] <= counts[0] + 40


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_no_step_waits_for_the_device(name: str) -> None:
    """A fake tensor has no values: whatever reads one raises. Markers are searched for as well."""
    marker = None if name == "constrained" else MARKER
    *_, prices = count_step(steering_of(ATTRIBUTES[name], 8, 2, marker), 8, measure=True)
    assert prices is not None
    assert [tensor.device.type for tensor in prices] == ["cuda", "cuda"]


@pytest.mark.parametrize(
    "wait",
    [
        lambda tensor: tensor.sum().item(),
        lambda tensor: tensor[[0, 1]],
        lambda tensor: torch.tensor([0, 1], device="cuda"),
        lambda tensor: tensor.nonzero(),
        lambda tensor: tensor + torch.zeros(4),
    ],
    ids=["item", "list", "tensor", "nonzero", "other device"],
)
def test_the_fake_device_finds_what_waits(wait: Callable[[torch.Tensor], object]) -> None:
    with FakeTensorMode(), DeviceIndexing():
        tensor = torch.zeros(4, device="cuda")
        with pytest.raises((AssertionError, RuntimeError)):
            wait(tensor)
