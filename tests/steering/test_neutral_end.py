"""Neutral ends: steering leaves the probability of end-of-text tokens as it was."""

import pytest
import torch
from torch import Tensor

from foretrace.attribute import Attribute
from foretrace.hmm import HMM, HMMConfig
from foretrace.lookahead import Lookahead
from foretrace.steering import Goal, PrefixTracker, Request
from goals import plain_goal
from tiny import TOKENS, tiny_hmm
from tiny_attributes import SPELLED, attributes

HMM_END, TURN_END = 2, 3


@pytest.fixture
def hmm() -> HMM:
    model = tiny_hmm("dense")
    config = HMMConfig(eos_token_ids=(HMM_END,))
    return HMM(model.initial, model.transition, model.emission, config)


def steer(hmm: HMM, requests: list[Request], logits: Tensor) -> Tensor:
    tracker = PrefixTracker(hmm)
    tracker.step(requests, [[1]] * len(requests))
    return tracker.reweight(logits)


def goal(hmm: HMM, name: str = "one", *, neutral_end: bool = True) -> Goal:
    return plain_goal(Lookahead(hmm, attributes()[name], 5), 3.0, -2.0, neutral_end)


@pytest.mark.parametrize("name", ["one", "not", "all"])
def test_every_end_of_a_request_keeps_its_probability(hmm: HMM, name: str) -> None:
    """A chat ends its turns with a token that is not the HMM's end of text."""
    logits = torch.tensor([[0.3, -1.0, 0.5, 1.5]])
    expected = logits.softmax(-1)
    request = Request((goal(hmm, name),), (1, 2), 9, ends=(TURN_END,))
    probabilities = steer(hmm, [request], logits).softmax(-1)
    torch.testing.assert_close(probabilities[:, [HMM_END, TURN_END]], expected[:, 2:])
    plain = Request((goal(hmm, name, neutral_end=False),), (1, 2), 9, ends=(TURN_END,))
    steered = steer(hmm, [plain], logits).softmax(-1)
    assert not torch.allclose(steered[:, [HMM_END, TURN_END]], expected[:, 2:])
    others = [each[:, :2] / each[:, :2].sum() for each in (steered, probabilities)]
    torch.testing.assert_close(*others)


def test_rows_of_a_batch_have_their_own_ends(hmm: HMM) -> None:
    """Rows without neutral ends are steered as they are alone, to the last digit."""
    ends: list[tuple[int, ...]] = [(), (TURN_END,), (0, TURN_END), (TURN_END,)]
    requests = [
        Request((goal(hmm, neutral_end=row != 1),), (1, 2), 9, ends=row_ends)
        for row, row_ends in enumerate(ends)
    ]
    requests.append(Request((), (1, 2), 9, ends=(TURN_END,)))
    logits = torch.randn(len(requests), TOKENS, generator=torch.Generator().manual_seed(0))
    steered = steer(hmm, requests, logits)
    for row, request in enumerate(requests):
        alone = steer(hmm, [request], logits[row : row + 1])[0]
        torch.testing.assert_close(steered[row], alone)
        kept = list(request.ends)
        neutral = any(goal.neutral_end for goal in request.goals)
        same = torch.allclose(steered[row].softmax(-1)[kept], logits[row].softmax(-1)[kept])
        assert same == (neutral or not request.goals)
    plain = [Request((goal(hmm, neutral_end=False),), (1, 2), 9) for _ in requests]
    assert torch.equal(steered[1], steer(hmm, plain, logits)[1])
    assert torch.equal(steered[4], logits[4])


def test_one_goal_with_a_neutral_end_is_enough(hmm: HMM) -> None:
    goals = (goal(hmm, "not", neutral_end=False), goal(hmm))
    logits = torch.tensor([[0.3, -1.0, 0.5, 1.5]])
    steered = steer(hmm, [Request(goals, (1,), 9)], logits).softmax(-1)
    torch.testing.assert_close(steered[0, HMM_END], logits.softmax(-1)[0, HMM_END])


def test_an_end_that_the_hmm_does_not_know_keeps_its_probability(hmm: HMM) -> None:
    request = Request((goal(hmm),), (1,), 9, ends=(TOKENS + 1, TOKENS + 100))
    logits = torch.randn(1, TOKENS + 3, generator=torch.Generator().manual_seed(0))
    steered = steer(hmm, [request], logits).softmax(-1)
    torch.testing.assert_close(steered[0, TOKENS + 1], logits.softmax(-1)[0, TOKENS + 1])
    assert steered[0, [TOKENS, TOKENS + 2]].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("neutral_end", [False, True])
def test_a_constraint_forbids_every_end_until_it_is_satisfied(hmm: HMM, neutral_end: bool) -> None:
    lookahead = Lookahead(hmm, Attribute.contains("aa", SPELLED), 8)
    unknown = TOKENS + 1
    request = Request((plain_goal(lookahead, neutral_end=neutral_end),), (1,), 9, ends=(unknown,))
    steered = steer(hmm, [request], torch.zeros(1, TOKENS + 2)).softmax(-1)
    assert steered[0, [HMM_END, unknown]].tolist() == [0.0, 0.0]
    assert float(steered[0, 0]) > 0


def test_a_constraint_in_a_batch_where_only_some_requests_have_ends() -> None:
    hmm = tiny_hmm("dense")  # without an end of text
    constraint = plain_goal(Lookahead(hmm, Attribute.contains("aa", SPELLED), 8))
    requests = [Request((constraint,), (1,), 9, ends=ends) for ends in ((), (TURN_END,))]
    logits = torch.zeros(2, TOKENS)
    steered = steer(hmm, requests, logits)
    for row, request in enumerate(requests):
        torch.testing.assert_close(steered[row], steer(hmm, [request], logits[:1])[0])
    assert float(steered.softmax(-1)[1, TURN_END]) == 0.0


def test_logits_that_allow_nothing_but_the_end(hmm: HMM) -> None:
    """As after a processor that ends the text: the end keeps a finite logit."""
    logits = torch.full((1, TOKENS), -torch.inf)
    logits[0, HMM_END] = 0.5
    steered = steer(hmm, [Request((goal(hmm),), (1,), 9)], logits)
    assert steered.softmax(-1)[0, HMM_END] == 1.0
    assert float(steered[0, HMM_END]) == 0.5


def test_a_goal_that_allows_nothing_but_the_end(hmm: HMM) -> None:
    """The constraint is satisfied, and all other tokens violate another one."""
    forbidding = ~Attribute.contains("a", SPELLED) & ~Attribute.contains("b", SPELLED)
    lookahead = Lookahead(hmm, forbidding, 8)
    request = Request((plain_goal(lookahead, neutral_end=True),), (1,), 9)
    logits = torch.randn(1, TOKENS, generator=torch.Generator().manual_seed(0))
    tracker = PrefixTracker(hmm)
    tracker.step([request], [[]])
    steered = tracker.reweight(logits)
    assert steered.isfinite()[0, HMM_END]
    assert steered.softmax(-1)[0, HMM_END] == 1.0


@pytest.mark.parametrize("name", ["one", "not", "all"])
def test_every_end_of_an_hmm_is_an_end(name: str) -> None:
    """An HMM of chats knows the end of a turn and the end of text: tokens 2 and 0."""
    hmm = tiny_hmm("two ends")
    logits = torch.tensor([[0.3, -1.0, 0.5, 1.5]])
    neutral, plain = (
        steer(hmm, [Request((goal(hmm, name, neutral_end=neutral_end),), (1,), 9)], logits)
        for neutral_end in (True, False)
    )
    torch.testing.assert_close(neutral.softmax(-1)[:, [2, 0]], logits.softmax(-1)[:, [2, 0]])
    change = plain - logits  # the same text without more tokens, whichever end it has
    torch.testing.assert_close(change[0, 2].exp(), change[0, 0].exp())


@pytest.mark.parametrize("end", [2, 0])
def test_what_precedes_an_end_in_a_prompt_is_not_read(end: int) -> None:
    hmm = tiny_hmm("two ends")
    requests = [Request((goal(hmm),), prompt, 9) for prompt in ((3,), (1, 3, end, 3))]
    tracker = PrefixTracker(hmm)
    tracker.step(requests, [[], []])
    alone, after = tracker.reweight(torch.zeros(2, TOKENS))
    torch.testing.assert_close(alone, after)
