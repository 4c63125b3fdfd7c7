"""Who takes rows of the pool gives them back, and nothing holds what is no longer used."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from foretrace.attribute import Attribute
from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM
from foretrace.steering import Compiler, Goal, Marker, Request, Steering
from foretrace.steering.goal import PooledLookahead
from foretrace.steering.pool import TablePool
from foretrace.steering.slab import Slab
from steering.test_oracle import goals
from tiny import TOKENS, tiny_hmm
from tiny_attributes import SPELLED, attributes

HORIZON = 5


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Turn the garbage collector off: reference counts alone must free what is not used."""
    gc.disable()
    yield
    gc.enable()


def drawn(seed: int) -> Attribute:
    return Attribute.from_weights(torch.rand(TOKENS, generator=torch.Generator().manual_seed(seed)))


def request_for(compiler: Compiler, *row: Goal) -> Request:
    return Request(compiler.compile(row), (1,), 20)


def test_a_slab_gives_out_every_row_once() -> None:
    slab, cpu = Slab((2,), torch.float32, torch.device("cpu")), {}
    generator = torch.Generator().manual_seed(0)
    for step in range(300):
        count = int(torch.randint(1, 9, (1,), generator=generator))
        first = slab.write(torch.full((count, 2), float(step)))
        cpu[first] = (count, float(step))
        if len(cpu) > 10:
            first = list(cpu)[int(torch.randint(len(cpu), (1,), generator=generator))]
            slab.free(first, cpu.pop(first)[0])
        for first, (count, value) in cpu.items():
            assert (slab.data[first : first + count] == value).all()
    assert len(slab.data) < 200


@pytest.mark.parametrize("name", ["one", "all", "must", "evidence", "product and transform"])
def test_equal_goals_share_their_rows(name: str) -> None:
    """Also if they are compiled apart. They are freed with the last sequence, if room is needed."""
    hmm = tiny_hmm("dense")
    steering = Steering(hmm, memory=0)
    steering.start({0: request_for(Compiler(hmm, HORIZON), *goals()[name])})
    size = steering.pool.nbytes
    steering.start({1: request_for(Compiler(hmm, HORIZON), *goals()[name])})
    assert steering.pool.nbytes == size
    steering.finish([0])
    assert steering.pool.nbytes == size
    steering.finish([1])
    assert steering.pool.nbytes == TablePool(hmm).nbytes


def test_the_budget_holds_for_any_number_of_goals_and_markers() -> None:
    """What no sequence uses makes room for what one needs."""
    hmm, budget = tiny_hmm("dense"), 20_000
    compiler, steering = Compiler(hmm, HORIZON, memory=0), Steering(hmm, memory=budget)
    largest = 0
    for seed in range(300):
        marker = Marker("abc"[seed % 3] * (1 + seed % 7), SPELLED)
        goal = drawn(seed) | drawn(seed + 1) if seed % 2 else drawn(seed)
        slot = seed % 4
        steering.start({slot: request_for(compiler, Goal(goal, 1.0, after=marker))})
        steering.reweight_(torch.zeros(1, TOKENS), [slot])
        largest = max(largest, steering.pool.nbytes)
    assert budget / 2 < largest <= budget
    assert compiler.nbytes < budget


def test_running_sequences_may_exceed_the_budget_and_give_it_back() -> None:
    hmm = tiny_hmm("dense")
    compiler, steering = Compiler(hmm, HORIZON), Steering(hmm, memory=10_000)
    for slot in range(50):
        steering.start({slot: request_for(compiler, Goal(drawn(slot), 1.0))})
    assert steering.pool.nbytes > 10_000
    steering.finish(range(50))
    assert steering.pool.nbytes <= 10_000


def test_a_goal_that_was_used_before_needs_no_tables() -> None:
    """A server loads tables once: what `find` returns stands for them, while they are there."""
    hmm = tiny_hmm("dense")
    compiler, steering = Compiler(hmm, HORIZON), Steering(hmm, memory=1 << 20)
    goal = compiler.compile(Goal(attributes()["one"], 2.0))
    key = goal.factors[0].key
    assert steering.pool.find(key) is None
    steering.start({0: Request(goal, (1,), 9)})
    steering.finish([0])
    pooled = steering.pool.find(key)
    assert isinstance(pooled, PooledLookahead)
    factor = goal.factors[0]._replace(lookahead=pooled)
    light = type(goal)(hmm, (factor,), goal.window, goal.neutral_end)
    steering.start({0: Request(light, (1,), 9)})
    assert steering.reweight_(torch.zeros(1, TOKENS), [0], measure=True) is not None
    with pytest.raises(InvalidInputError, match="removed from the pool"):
        Steering(hmm).start({0: Request(light, (1,), 9)})


def test_goals_that_start_together_do_not_remove_each_other() -> None:
    """A server has found the second goal in the pool, and the first one needs room."""
    hmm = tiny_hmm("dense")
    compiler, steering = Compiler(hmm, HORIZON), Steering(hmm, memory=0)
    known = compiler.compile(Goal(drawn(0), 1.0))
    steering.start({0: Request(known, (1,), 9), 9: request_for(compiler, Goal(drawn(9), 1.0))})
    steering.finish([0])  # nothing uses its rows now, and the other sequence goes on
    pooled = steering.pool.find(known.factors[0].key)
    assert isinstance(pooled, PooledLookahead)
    factor = known.factors[0]._replace(lookahead=pooled)
    light = type(known)(hmm, (factor,), known.window, known.neutral_end)
    new = request_for(compiler, Goal(drawn(1) | drawn(2), 1.0))
    steering.start({0: new, 1: Request(light, (1,), 9)})
    assert steering.reweight_(torch.zeros(1, TOKENS), [1], measure=True) is not None


def test_a_start_that_fails_takes_nothing() -> None:
    hmm = tiny_hmm("dense")
    compiler, steering = Compiler(hmm, HORIZON), Steering(hmm, memory=0)
    other = Marker("a", [*SPELLED, b"d"])
    good = request_for(compiler, Goal(drawn(0), 1.0, after=Marker("a", SPELLED)))
    bad = request_for(compiler, Goal(drawn(1), 1.0, after=other))
    steering.start({0: good})
    with pytest.raises(InvalidInputError, match="tokenizer of the marker 'a' has 5 tokens"):
        steering.start({1: good, 2: bad})
    assert steering.slots == {0}
    steering.finish([0])
    assert steering.pool.nbytes == TablePool(hmm).nbytes


@pytest.mark.usefixtures("no_collector")
def test_nothing_is_held_once_goal_and_steering_are_gone() -> None:
    hmm = HMM.random(4, TOKENS, seed=0)
    compiler = Compiler(hmm, HORIZON)
    steering = Steering(hmm)
    request = request_for(compiler, Goal(drawn(0), level="medium"))
    steering.start({0: request})
    steering.reweight_(torch.zeros(1, TOKENS), [0])
    steering.advance([0], torch.tensor([1]))
    assert request.goal is not None
    pool, lookahead = steering.pool, request.goal.factors[0].lookahead
    owned: list[Any] = [hmm, request.goal, pool, pool.tables, lookahead]
    held = [weakref.ref(one) for one in owned]
    del pool, lookahead, owned
    del request
    steering.finish([0])
    assert held[1]() is None  # the goal; the compiler keeps its tables
    del steering
    assert [ref() is None for ref in held] == [False, True, True, True, False]
    del compiler, hmm
    assert all(ref() is None for ref in held)
