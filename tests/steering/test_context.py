"""Context rewards: a step equals its definition, and no row is steered by a wrong state."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import oracle
from foretrace.attribute import Attribute, ContextReward
from foretrace.attribute.terms import Terms
from foretrace.context import Head, Probe
from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM
from foretrace.steering import Compiler, Goal, Marker, Request, Steering
from foretrace.steering.batch_index import Kernels
from steering.test_oracle import KERNELS, LIMIT, assert_same, goals
from tiny import TOKENS, tiny_hmm
from tiny_attributes import SPELLED, attributes

HORIZON = 1
WIDTH, VOCAB, PADDED = 5, 40, 43  # hidden state, rows of the head, columns of the logits
MARKER = Marker("ab", SPELLED)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# Tokens that the HMM does not know are improbable, because they are forbidden at any price.
BIAS = torch.where(torch.arange(VOCAB) < TOKENS, 0.0, -20.0)
HEAD = Head(drawn(VOCAB, WIDTH, seed=0), BIAS, scale=0.5)


def exact_probe(head: Head = HEAD) -> Probe:
    """Build a probe whose features are not rounded to float16."""
    probe = Probe.build(head, source="tiny")
    centred = head.weight - head.weight.mean(0)
    return replace(probe, features=centred @ probe.basis / probe.basis.square().sum(0))


PROBE = exact_probe()


def reward(seed: int, rank: int = 2, size: float = 0.3) -> ContextReward:
    readers, writers = drawn(rank, WIDTH + 1, seed=seed), drawn(rank, WIDTH, seed=seed + 1)
    return ContextReward(readers, size * writers, HEAD.fingerprint)


def by_context(seed: int, rank: int = 2, size: float = 0.3) -> Attribute:
    return Attribute(Terms.one(), context=reward(seed, rank, size)).renamed("moody")


def logits_of(states: Tensor) -> Tensor:
    """Return the logits of the LM, with columns that its head does not have."""
    return torch.nn.functional.pad(HEAD.logits(states), (0, PADDED - VOCAB), value=-20.0)


def mixed_rows() -> dict[str, tuple[list[Goal], list[int]]]:
    """Return goals with and without context rewards, and the tokens generated before."""
    known = attributes()
    kind = Attribute.from_rewards([0.25, -0.5, 1.0, 0.1]).with_context(reward(10))
    calm, strong = by_context(20, rank=3), by_context(30, size=5.0)
    return {
        "context alone": ([Goal(calm, 1.0)], []),
        "without context": (goals()["all"], [0]),
        "evidence and context": ([Goal(kind, 1.5)], [3, 1]),
        "negated": ([Goal(~kind, 1.0)], [0]),
        "two contexts": ([Goal(kind & ~calm, 1.0)], []),
        "two goals": ([Goal(kind, 0.5), Goal(calm, 2.0)], [1]),
        "product": ([Goal(known["one"] & calm, 1.0)], [0, VOCAB + 1, 0]),
        "sum": ([Goal(known["all"] & calm, 1.0)], []),
        "constraint": ([Goal(known["must"] & kind, 1.0)], [0, 1]),
        "strong": ([Goal(strong, 1.0)], []),
        "limited": ([Goal(kind, 9.0)], []),
        "ends are steered": ([Goal(calm, 1.0, neutral_end=False)], [1]),
        "in the window": ([Goal(kind, 1.0, window=2)], [0]),
        "after the window": ([Goal(kind, 1.0, window=2)], [0, 1]),
        "before a marker": ([Goal(calm, 1.0, after=MARKER)], [0]),
        "after a marker": ([Goal(calm, 1.0, after=MARKER)], [0, 1]),
    }


ROWS = mixed_rows()
WINDOWS = {"in the window": (0, 2), "after the window": (0, 2)}
WINDOWS |= {"before a marker": (None, None), "after a marker": (2, None)}  # type: ignore[dict-item]


def expected_row(hmm: HMM, name: str, state: Tensor | None) -> oracle.Row:
    row_goals, generated = ROWS[name]
    begin, end = WINDOWS.get(name, (0, None))
    return oracle.Row(
        hmm,
        Compiler(hmm, HORIZON).merge(row_goals),
        generated,
        LIMIT,
        prompt=(1, 2),
        table_horizon=HORIZON,
        stop_ids=(1, TOKENS, *hmm.config.eos_token_ids),
        neutral_end=row_goals[0].neutral_end,
        begin=begin,
        end=end,
        head=HEAD.weight,
        state=state,
    )


def started(hmm: HMM, names: list[str], kernels: Kernels) -> Steering:
    compiler, steering = Compiler(hmm, HORIZON, PROBE), Steering(hmm, kernels=kernels)
    requests = {
        number: Request(compiler.compile(ROWS[name][0]), (1, 2), LIMIT, stop_ids=(1, TOKENS))
        for number, name in enumerate(names)
    }
    steering.start(requests, {number: ROWS[name][1] for number, name in enumerate(names)})
    return steering


@pytest.mark.parametrize("kernels", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("form", ["dense", "eos"])
def test_goals_with_and_without_context_in_one_batch(form: str, kernels: Kernels) -> None:
    """The HMM knows fewer tokens than the head, and the logits have more columns."""
    hmm, names = tiny_hmm(form), list(ROWS)
    states = drawn(len(names), WIDTH, seed=3)
    logits = logits_of(states)
    steered, steering = logits.clone(), started(hmm, names, kernels)
    prices = steering.reweight_(steered, [*range(len(names))], measure=True)
    assert prices is not None
    limited = 0
    for number, name in enumerate(names):
        row = expected_row(hmm, name, states[number])
        exact = row.steer(logits[number])
        assert_same(steered[number], exact, atol=0.02 if row.is_limited else 1e-5)
        limited += row.is_limited
        price = oracle.price(logits[number], steered[number])
        assert prices.nats[number].item() == pytest.approx(price, abs=2e-5)
    assert limited
    assert steering.unreadable == 0


CHANGES = {"one masked": 1, "half of them masked": 10, "one biased": 1}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kernels", KERNELS.values(), ids=KERNELS)
def test_changed_logits_are_solved_or_left_out(change: str, kernels: Kernels) -> None:
    """Steered by the right state, or without context, and then counted."""
    hmm, names = tiny_hmm("dense"), list(ROWS)
    states = drawn(len(names), WIDTH, seed=4)
    logits = logits_of(states)
    unused = PROBE.tokens[PROBE.tokens > TOKENS][: CHANGES[change]]
    logits[:, unused] = logits[:, unused] + 7.0 if "biased" in change else -torch.inf
    steered, steering = logits.clone(), started(hmm, names, kernels)
    steering.reweight_(steered, [*range(len(names))])
    solved = kernels.solves_states and change != "half of them masked"
    for number, name in enumerate(names):
        row = expected_row(hmm, name, states[number] if solved else None)
        exact = row.steer(logits[number])
        assert_same(steered[number], exact, atol=0.02 if row.is_limited else 1e-5)
    not_read = {"without context", "after the window", "before a marker"}
    assert steering.unreadable == (0 if solved else len(names) - len(not_read))


def test_rows_of_the_pool_are_given_back() -> None:
    hmm, names = tiny_hmm("dense"), list(ROWS)
    steering = started(hmm, names, KERNELS["cpu"])
    size = steering.pool.nbytes
    assert size > PROBE.features.nbytes
    for _ in range(3):
        steering.finish(range(len(names)))
        steering.start(started(hmm, names, KERNELS["cpu"])._requests)
        assert steering.pool.nbytes == size
    steering.pool.memory = 0
    steering.finish(range(len(names)))
    assert steering.pool.context is None


def test_the_budget_holds_for_any_number_of_context_rewards() -> None:
    hmm, budget = tiny_hmm("dense"), 20_000
    compiler, steering = Compiler(hmm, 1, PROBE, memory=0), Steering(hmm, memory=budget)
    for seed in range(200):
        goal = compiler.compile(Goal(by_context(seed, rank=1 + seed % 5), 1.0))
        steering.start({seed % 3: Request(goal, (1,), 9)})
        steering.reweight_(logits_of(drawn(1, WIDTH, seed=seed)), [seed % 3])
        assert steering.pool.nbytes <= budget


def test_a_goal_needs_the_probe_of_its_lm() -> None:
    hmm, goal = tiny_hmm("dense"), Goal(by_context(0), 1.0)
    with pytest.raises(InvalidInputError, match=r"'moody' has a context.*`foretrace probe LM"):
        Compiler(hmm, HORIZON).compile(goal)
    head = Head(drawn(VOCAB, WIDTH, seed=1))
    other = exact_probe(head)
    with pytest.raises(InvalidInputError, match=r"but the probe is of tiny.*`foretrace probe LM"):
        Compiler(hmm, HORIZON, other).compile(goal)
    context = replace(reward(0), fingerprint=head.fingerprint)
    elsewhere = Compiler(hmm, HORIZON, other).compile(Goal(goal.attribute.with_context(context), 1))
    steering = started(hmm, ["context alone"], KERNELS["cpu"])
    with pytest.raises(InvalidInputError, match="probe was made for tiny"):
        steering.start({1: Request(elsewhere, (1,), 9)})
    with pytest.raises(InvalidInputError, match="one column for each token"):
        steering.reweight_(torch.zeros(1, VOCAB - 1), [0])


def test_compiled_goals_without_context_have_no_probe() -> None:
    compiler = Compiler(tiny_hmm("dense"), HORIZON, PROBE)
    assert compiler.compile(Goal(attributes()["one"], 1.0)).probe is None
    assert compiler.compile(Goal(by_context(0), 1.0)).probe is PROBE
