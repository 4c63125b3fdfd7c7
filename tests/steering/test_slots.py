"""Slot tensors against the oracle, which steers row by row; requests come, go and wait."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from foretrace.attribute import Attribute, LogitAffine
from foretrace.attribute.evidence import Evidence
from foretrace.hmm import HMM
from foretrace.lookahead import Lookahead
from foretrace.steering import Goal, Marker, Request, SlotSteering
from oracle.batch import BatchSteering
from tiny import TOKENS, tiny_hmm
from tiny_attributes import SPELLED, attributes

HORIZON, LIMIT, STEPS = 6, 14, 40
MARKERS = [Marker("b", SPELLED), Marker("ca", SPELLED)]


def rewards(once: bool) -> Attribute:
    values = torch.tensor([1.5, -2.0, 0.5]).double()
    evidence = Evidence(0.0, torch.arange(3).int(), values, first_only=once)
    return Attribute(attributes()["nothing to weigh"].terms, evidence=(evidence,))


def lookaheads(hmm: HMM) -> dict[str, Lookahead]:
    every = {**attributes(), "rewards": rewards(once=False), "rewards once": rewards(once=True)}
    return {name: Lookahead(hmm, attribute, HORIZON) for name, attribute in every.items()}


def random_request(choices: dict[str, Lookahead], source: random.Random) -> Request:
    """Draw a request: one goal of any kind, or two with transforms; any window; any ends."""
    name = source.choice([*choices])
    transformed = "rewards" not in name and source.random() < 0.4
    shift = (source.choice([1.0, 2.5]), source.choice([0.0, -1.0]))
    after = source.choice([None, None, MARKERS[0]])
    window = source.choice([None, None, 4, MARKERS[1]])
    if choices[name].requires_text:
        after, window = None, None
    settings: dict[str, Any] = {"neutral_end": source.random() < 0.5}
    settings |= {"after": after, "window": window}
    transform = LogitAffine(*shift) if transformed else LogitAffine()
    goals = [Goal(choices[name], 1.0, transform=transform, **settings)]
    if transformed and source.random() < 0.5:
        goals.append(Goal(choices["or"], 1.0, transform=LogitAffine(0.7), **settings))
    prompt = tuple(source.choices(range(TOKENS), k=source.randrange(4)))
    horizon = source.choice([None, None, 2])
    ends = source.choice([(), (3,), (3, TOKENS + 1)])
    return Request(tuple(goals), prompt, LIMIT, horizon, ends)


class Sequence:
    """A request with its tokens, in both forms of steering."""

    def __init__(self, slot: int, request: Request) -> None:
        self.slot, self.request = slot, request
        self.generated: list[int] = []
        self.is_read = False


def oracle_logits(oracle: BatchSteering, sequences: list[Sequence], logits: Tensor) -> Tensor:
    requests = [sequence.request for sequence in sequences]
    states = oracle.read_generated(requests, [sequence.generated for sequence in sequences])
    return oracle.reweight_(logits.clone(), states)


@pytest.mark.parametrize("form", ["dense", "sparse", "eos", "structured"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("by_automaton", [True, False], ids=["CPU", "GPU"])
def test_a_batch_of_any_requests_equals_the_oracle(
    form: str, seed: int, by_automaton: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of all kinds come, go, change rows and are read again; to 1e-8 in float64."""
    monkeypatch.setattr("foretrace.steering.automaton_plan.is_cpu", lambda pool: by_automaton)
    source, hmm = random.Random(f"{form} {seed}"), tiny_hmm(form)
    steering, oracle, choices = SlotSteering(hmm), BatchSteering(hmm), lookaheads(hmm)
    generator = torch.Generator().manual_seed(seed)
    batch: list[Sequence] = []
    compared = 0
    for _ in range(STEPS):
        batch = [one for one in batch if len(one.generated) < LIMIT and source.random() < 0.9]
        free = [slot for slot in range(9) if slot not in {one.slot for one in batch}]
        for slot in free[: source.choice([0, 0, 1, 3])]:
            batch.append(Sequence(slot, random_request(choices, source)))
        source.shuffle(batch)
        if not batch:
            continue
        step(steering, batch)
        logits = torch.randn(len(batch), TOKENS + 2, generator=generator, dtype=torch.float64)
        steered = steering.reweight_(logits.clone(), [one.slot for one in batch])
        expected = oracle_logits(oracle, batch, logits)
        # Random tokens may violate a constraint: then no token is possible in both.
        results = (steered.softmax(-1), expected.softmax(-1))
        torch.testing.assert_close(*results, rtol=0, atol=1e-8, equal_nan=True)
        compared += len(batch)
        for one in batch:
            one.is_read = one.is_read and source.random() < 0.9  # else it was preempted
            one.generated.append(source.randrange(TOKENS + 1))
    assert compared > STEPS


def step(steering: SlotSteering, batch: list[Sequence]) -> None:
    """Advance the sequences that were read before, and read the others."""
    steering.assign({one.slot: one.request for one in batch})
    moved = torch.tensor([one.is_read for one in batch])
    tokens = torch.tensor([one.generated[-1] if one.is_read else 0 for one in batch])
    if bool(moved.any()):
        steering.advance([one.slot for one in batch], tokens, None if moved.all() else moved)
    new = [one for one in batch if not one.is_read]
    requests = [one.request for one in new]
    steering.read_generated([one.slot for one in new], requests, [one.generated for one in new])
    for one in batch:
        one.is_read = True


def test_rows_without_goals_are_not_changed() -> None:
    hmm = tiny_hmm("dense")
    steering = SlotSteering(hmm)
    request = Request((Goal(lookaheads(hmm)["one"], 3.0),), (), LIMIT)
    steering.read_generated([4], [request], [[]])
    logits = torch.randn(3, TOKENS)
    steered = steering.reweight_(logits.clone(), [None, 4, None])
    assert torch.equal(steered[[0, 2]], logits[[0, 2]])
    assert not torch.equal(steered[1], logits[1])
    assert torch.equal(steering.reweight_(logits.clone(), [None] * 3), logits)


def test_tables_leave_the_pool_with_their_lookahead() -> None:
    hmm = tiny_hmm("dense")
    steering = SlotSteering(hmm)
    for name in ("one", "must", "all") * 4:  # every time a new lookahead
        request = Request((Goal(Lookahead(hmm, attributes()[name], HORIZON), 1.0),), (), LIMIT)
        steering.read_generated([0], [request], [[]])
        steering.reweight_(torch.zeros(1, TOKENS), [0])
    rows = max((HORIZON + 1) * len(attributes()[name].terms) * 8 for name in ("one", "must", "all"))
    assert len(steering.pool.tables.rows) <= 4 * rows


def test_a_request_in_the_place_of_another_has_its_own_goals() -> None:
    """A new object may have the address of an old one: an address does not identify a request."""
    hmm = tiny_hmm("dense")
    steering, oracle, choices = SlotSteering(hmm), BatchSteering(hmm), lookaheads(hmm)
    logits = torch.randn(1, TOKENS, dtype=torch.float64)
    goals = [(Goal(choices[name], 1.0),) for name in ("one", "or", "must not")]
    for goal in goals * 5:
        sequence = Sequence(0, Request(goal, (1,), LIMIT))
        steering.assign({0: sequence.request})
        steering.read_generated([0], [sequence.request], [[]])
        steered = steering.reweight_(logits.clone(), [0])
        torch.testing.assert_close(steered, oracle_logits(oracle, [sequence], logits))
        del sequence  # nothing holds it now
        steering.assign({})


@pytest.mark.parametrize("name", ["one", "weighed and must", "rewards once"])
@pytest.mark.parametrize("window", [None, 4])
def test_rows_without_a_new_token_keep_their_state(name: str, window: int | None) -> None:
    hmm = tiny_hmm("dense")
    if name == "weighed and must":
        window = None
    goal = Goal(lookaheads(hmm)[name], 1.0, window=window)
    request = Request((goal,), (1,), LIMIT)
    steering, alone = SlotSteering(hmm), SlotSteering(hmm)
    steering.read_generated([0, 1], [request] * 2, [[0, 2], [0, 2]])
    alone.read_generated([0], [request], [[0, 2]])
    waiting = alone.reweight_(torch.zeros(1, TOKENS), [0])
    steering.advance([0, 1], torch.tensor([3, 3]), torch.tensor([True, False]))
    alone.advance([0], torch.tensor([3]))
    moved = alone.reweight_(torch.zeros(1, TOKENS), [0])
    assert not torch.allclose(moved, waiting)
    found = steering.reweight_(torch.zeros(2, TOKENS), [0, 1])
    torch.testing.assert_close(found, torch.cat([moved, waiting]))
    assert steering.state.numbers_of(torch.arange(2)).num_generated.tolist() == [3, 2]
