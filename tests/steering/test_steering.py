"""Sequences that come, go, wait and change rows are steered as if they were alone."""

import itertools
import random

import pytest
import torch
from torch import Tensor

import oracle
from foretrace.engines.prefix_tracker import PrefixTracker
from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM
from foretrace.steering import CompiledGoal, Compiler, Goal, Marker, Request, Steering
from foretrace.steering.batch_index import Kernels
from foretrace.steering.state import MIN_LENGTH, READ_BACK, predict_after
from goals import compiled, reweighted, steer
from steering.test_oracle import goals
from tiny import TOKENS, tiny_hmm
from tiny_attributes import SPELLED, attributes

HORIZON, LIMIT, STEPS = 3, 14, 30
WINDOWS: list[dict[str, int | Marker]] = [
    {},
    {},
    {"window": 4},
    {"after": Marker("b", SPELLED)},
    {"window": Marker("ca", SPELLED)},
]


class Sequence:
    """A request with its tokens."""

    def __init__(self, slot: int, request: Request) -> None:
        self.slot, self.request = slot, request
        self.generated: list[int] = []
        self.is_started = False


def all_goals(hmm: HMM) -> list[CompiledGoal]:
    """Compile goals of every kind, with several windows."""
    compiler, windows = Compiler(hmm, HORIZON), itertools.cycle(WINDOWS)
    made: list[CompiledGoal] = []
    for row in goals().values():
        window = next(windows)
        if any(goal.attribute.terms.automaton is not None for goal in row):
            window = {}
        settings = {"neutral_end": len(made) % 2 == 0, **window}
        made.append(
            compiler.compile(
                [
                    Goal(one.attribute, one.strength, one.level, one.transform, **settings)  # type: ignore[arg-type]
                    for one in row
                ]
            )
        )
    return made


def random_request(choices: list[CompiledGoal], source: random.Random) -> Request:
    prompt = tuple(source.choices(range(TOKENS), k=source.randrange(4)))
    stop_ids = source.choice([(), (3,), (3, TOKENS + 1)])
    return Request(source.choice(choices), prompt, LIMIT, source.choice([None, None, 2]), stop_ids)


@pytest.mark.parametrize("form", ["dense", "sparse", "eos", "structured"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_batch_of_any_requests_equals_rows_that_are_started_anew(form: str, device: str) -> None:
    """Requests of all kinds come, go, change rows and are preempted; to 1e-8 in float64.

    `test_oracle` compares rows that are started with the definition.
    """
    source, hmm = random.Random(form), tiny_hmm(form)
    kernels = Kernels.for_device(torch.device(device))
    steering, choices = Steering(hmm, kernels=kernels), all_goals(hmm)
    generator = torch.Generator().manual_seed(0)
    batch: list[Sequence] = []
    compared = 0
    for _ in range(STEPS):
        ended = [one for one in batch if len(one.generated) == LIMIT or source.random() < 0.1]
        steering.finish([one.slot for one in ended])
        batch = [one for one in batch if one not in ended]
        free = [slot for slot in range(9) if slot not in {one.slot for one in batch}]
        for slot in free[: source.choice([0, 0, 1, 3])]:
            batch.append(Sequence(slot, random_request(choices, source)))
        source.shuffle(batch)
        if not batch:
            continue
        step(steering, batch)
        logits = torch.randn(len(batch), TOKENS + 2, generator=generator, dtype=torch.float64)
        steered, expected = logits.clone(), logits.clone()
        steering.reweight_(steered, [one.slot for one in batch])
        alone = Steering(hmm, kernels=kernels)
        alone.start(
            {row: one.request for row, one in enumerate(batch)},
            {row: one.generated for row, one in enumerate(batch)},
        )
        alone.reweight_(expected, [*range(len(batch))])
        # Random tokens may violate a constraint: then no token is possible in both.
        results = (steered.softmax(-1), expected.softmax(-1))
        torch.testing.assert_close(*results, rtol=0, atol=1e-8, equal_nan=True)
        compared += len(batch)
        for one in batch:
            one.is_started = source.random() < 0.9  # else it is preempted
            one.generated.append(source.randrange(TOKENS + 1))
    assert compared > STEPS


def step(steering: Steering, batch: list[Sequence]) -> None:
    """Advance the sequences that have a state, and start the others from their tokens."""
    waiting = [one for one in batch if not one.is_started]
    steering.finish([one.slot for one in waiting])
    moved = torch.tensor([one.is_started for one in batch])
    tokens = torch.tensor([one.generated[-1] if one.is_started else 0 for one in batch])
    if bool(moved.any()):
        rows = [one.slot if one.is_started else None for one in batch]
        steering.advance(rows, tokens)
    steering.start(
        {one.slot: one.request for one in waiting}, {one.slot: one.generated for one in waiting}
    )


def test_rows_without_a_goal_are_not_changed() -> None:
    hmm = tiny_hmm("dense")
    steering = Steering(hmm)
    steering.start({4: Request(compiled(hmm, attributes()["one"], 3, 3.0), (), LIMIT)})
    logits = torch.randn(3, TOKENS)
    steered = logits.clone()
    steering.reweight_(steered, [None, 4, None])
    assert torch.equal(steered[[0, 2]], logits[[0, 2]])
    assert not torch.equal(steered[1], logits[1])
    untouched = logits.clone()
    assert steering.reweight_(untouched, [None] * 3, measure=True) is None
    assert torch.equal(untouched, logits)


@pytest.mark.parametrize("name", ["one", "weighed and must", "evidence"])
def test_rows_without_a_new_token_keep_their_state(name: str) -> None:
    hmm = tiny_hmm("dense")
    request = Request(Compiler(hmm, HORIZON).compile(goals()[name]), (1,), LIMIT)
    steering = Steering(hmm)
    steering.start({0: request, 1: request}, {0: [0, 2], 1: [0, 2]})
    steering.advance([0, 1], torch.tensor([3, 3]), torch.tensor([True, False]))
    logits = torch.zeros(2, TOKENS, dtype=torch.float64)
    expected = steer(hmm, [request] * 2, [[0, 2, 3], [0, 2]], logits)
    steering.reweight_(logits, [0, 1])
    torch.testing.assert_close(logits, expected)


def test_a_request_in_the_slot_of_another_has_its_own_goal() -> None:
    """A new object may have the address of an old one: an address does not identify a request."""
    hmm, logits = tiny_hmm("dense"), torch.randn(1, TOKENS, dtype=torch.float64)
    steering, compiler = Steering(hmm), Compiler(hmm, HORIZON)
    for name in ("one", "or", "must not") * 5:
        goal, steered = goals()[name], logits.clone()
        steering.start({0: Request(compiler.compile(goal), (1,), LIMIT)})
        steering.reweight_(steered, [0])
        row = oracle.Row(hmm, compiler.merge(goal), [], LIMIT, (1,), HORIZON)
        torch.testing.assert_close(steered[0].softmax(-1), row.steer(logits[0]).softmax(-1))


def test_beams_take_the_state_of_others() -> None:
    """Rows may swap, be copied, and be dropped."""
    hmm = tiny_hmm("dense")
    request = Request(Compiler(hmm, HORIZON).compile(goals()["evidence"]), (1,), LIMIT)
    tracker, logits = PrefixTracker(hmm), torch.randn(3, TOKENS, dtype=torch.float64)
    for texts in (
        [[0], [1], [2]],
        [[1, 3], [0, 2], [0, 0]],
        [[0, 2, 1], [0, 2, 3], [1, 3, 0]],
        [[0, 2, 1], [1, 3, 0, 0], [3]],
        [[1, 3, 0, 0, 1]],
    ):
        requests = [request] * len(texts)
        tracker.step(requests, texts)
        steered = reweighted(tracker, logits[: len(texts)])
        torch.testing.assert_close(steered, steer(hmm, requests, texts, logits[: len(texts)]))


def test_beams_that_change_places_keep_the_index_of_the_batch() -> None:
    """Their requests are equal: only states move, and nothing is copied to the device again."""
    hmm = tiny_hmm("dense")
    request = Request(Compiler(hmm, HORIZON).compile(goals()["one"]), (1,), LIMIT)
    tracker, logits = PrefixTracker(hmm), torch.zeros(2, TOKENS)
    indices = []
    for texts in ([[0], [1]], [[1, 2], [0, 2]], [[0, 2, 1], [1, 2, 1]]):
        tracker.step([request] * 2, texts)
        tracker.reweight_(logits.clone())
        (kept,) = tracker.steering._kept.values()
        indices.append(kept.index)
    assert indices[0] is indices[1] is indices[2]


def test_logits_that_do_not_fit_the_batch_are_refused() -> None:
    tracker = PrefixTracker(tiny_hmm("dense"))
    tracker.step([Request(None, (), 5)], [[]])
    with pytest.raises(InvalidInputError, match="1 rows"):
        tracker.reweight_(torch.zeros(2, TOKENS))
    with pytest.raises(InvalidInputError, match="4 tokens"):
        tracker.reweight_(torch.zeros(1, TOKENS - 1))


def persistent_hmm() -> HMM:
    """Two states that hardly ever change; tokens 0 and 1 tell them apart, 2 and 3 do not."""
    transition = torch.tensor([[0.999, 0.001], [0.001, 0.999]], dtype=torch.float64)
    emission = torch.tensor([[0.2, 0.0], [0.0, 0.2], [0.5, 0.5], [0.3, 0.3]], dtype=torch.float64)
    return HMM(torch.tensor([0.5, 0.5], dtype=torch.float64), transition, emission)


def state_after(hmm: HMM, prompt: list[int], generated: list[int]) -> Tensor:
    steering = Steering(hmm)
    goal = compiled(hmm, attributes()["one"], HORIZON)
    steering.start({0: Request(goal, tuple(prompt), 1000)}, {0: generated})
    return steering.state.predicted[0]


@pytest.mark.parametrize("num_generated", [0, 50, 300])
def test_the_filter_reads_the_last_tokens_of_a_prompt_and_all_others(num_generated: int) -> None:
    hmm, later = persistent_hmm(), [2] * (READ_BACK - 1)
    near, far = (
        float(state_after(hmm, prompt, [2] * num_generated)[0])
        for prompt in ([2] * 40 + [0] + later, [2] * 40 + [0, 2] + later)
    )
    assert near == pytest.approx(0.5 + 0.5 * 0.998 ** (READ_BACK + num_generated))
    assert far == pytest.approx(0.5)


@pytest.mark.parametrize("end", [2, 0])
def test_what_precedes_an_end_in_a_prompt_is_not_read(end: int) -> None:
    hmm = tiny_hmm("two ends")
    prompts = torch.tensor([[3, 0, 0, 0], [1, 3, end, 3]])
    alone, after = predict_after(hmm, prompts, torch.tensor([1, 4]))
    torch.testing.assert_close(alone, after)


def test_unknown_tokens_change_nothing_but_the_count() -> None:
    """Whether they are read or advance a state, and wherever they stand in the sequence."""
    hmm = tiny_hmm("dense")
    request = Request(Compiler(hmm, HORIZON).compile(goals()["weighed and must"]), (1,), 20)
    texts = [[0, 3], [0, TOKENS, 3], [TOKENS + 9, 0, 3], [0, 3, TOKENS], [0, 3]]
    steering = Steering(hmm)
    steering.start(dict.fromkeys(range(5), request), dict(enumerate(texts)))
    steering.advance([None] * 4 + [4], torch.tensor([0] * 4 + [TOKENS]))
    state = steering.state
    assert state.counters[:5, 0].tolist() == [2, 3, 3, 3, 3]
    for slot in range(1, 5):
        torch.testing.assert_close(state.predicted[slot], state.predicted[0])
        torch.testing.assert_close(state.log_past[slot], state.log_past[0])
        assert torch.equal(state.counters[slot, 1:], state.counters[0, 1:])


def test_long_texts_leave_no_columns_behind() -> None:
    """A step reads the seen tokens of the sequences that run, and not of one that has ended."""
    hmm = tiny_hmm("dense")
    request = Request(Compiler(hmm, HORIZON).compile(goals()["evidence"]), (1,), 5000)
    steering = Steering(hmm)
    steering.start({0: request, 1: request}, {0: [1] * 2000})
    assert steering.state.seen_tokens.shape[1] > 2000
    steering.finish([0])
    steering.advance([1], torch.tensor([2]))
    assert steering.state.seen_tokens.shape[1] <= 4 * MIN_LENGTH
    logits = torch.zeros(1, TOKENS, dtype=torch.float64)
    steering.reweight_(logits, [1])
    expected = steer(hmm, [request], [[2]], torch.zeros(1, TOKENS, dtype=torch.float64))
    torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize("name", attributes())
def test_a_mask_keeps_its_tokens(name: str) -> None:
    """A grammar masks logits before steering: what it forbids stays so, and a token is left.

    This holds for every mask, also if the only tokens left are improbable under the HMM.
    """
    hmm = persistent_hmm()
    masks = torch.tensor(list(itertools.product([False, True], repeat=TOKENS)))[:-1]
    request = Request(compiled(hmm, attributes()[name], 4), (0,), 4, stop_ids=(TOKENS - 1,))
    logits = torch.randn(len(masks), TOKENS).masked_fill(masks, -torch.inf)
    probabilities = steer(hmm, [request] * len(masks), [[0]] * len(masks), logits).softmax(-1)
    assert not probabilities.isnan().any()
    assert (probabilities[masks] == 0.0).all()


def test_the_end_of_a_text_keeps_its_probability() -> None:
    """Unless a constraint forbids it; also ends that the HMM does not know."""
    hmm, unknown = tiny_hmm("eos"), TOKENS + 1
    compiler = Compiler(hmm, HORIZON)
    logits = torch.randn(2, TOKENS + 3, generator=torch.Generator().manual_seed(0))
    requests = [
        Request(compiler.compile(Goal(attributes()[name], 1.0)), (1,), 9, None, (unknown, 3))
        for name in ("one", "must")
    ]
    steered = steer(hmm, requests, [[1], [1]], logits).softmax(-1)
    ends = [2, 3, unknown]
    torch.testing.assert_close(steered[0, ends], logits.softmax(-1)[0, ends])
    assert steered[0, [TOKENS, TOKENS + 2]].tolist() == [0.0, 0.0]
    assert steered[1, [2, unknown]].tolist() == [0.0, 0.0]
