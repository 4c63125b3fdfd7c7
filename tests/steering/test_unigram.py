"""Steering with a unigram HMM, that is, by the next token alone."""

import pytest
import torch

from foretrace.attribute import Attribute
from foretrace.hmm import HMM
from foretrace.lookahead import Lookahead
from foretrace.steering import Request
from goals import compiled, plain_goal, steer
from steering.test_constraints import END, sample

FREQUENCIES = torch.tensor([5.0, 1.0, 0.0, 2.0])
REWARDS = torch.tensor([0.0, -0.5, 0.2, 0.8], dtype=torch.float64)  # the reward of END is ignored
STRENGTH, HORIZON = 1.7, 6


@pytest.fixture(scope="module")
def hmm() -> HMM:
    return HMM.unigram(FREQUENCIES, eos_token_ids=[END])


@pytest.mark.parametrize(
    "attribute",
    [Attribute.from_rewards(REWARDS), Attribute.from_weights((REWARDS - 1).exp())],
    ids=["evidence", "product"],
)
def test_goals_weigh_the_next_token_alone(hmm: HMM, attribute: Attribute) -> None:
    goal = compiled(hmm, attribute, HORIZON, STRENGTH, neutral_end=False)
    logits = torch.randn(2, len(REWARDS), generator=torch.Generator().manual_seed(0))
    steered = steer(hmm, [Request(goal, (0,), 20)] * 2, [[], [0, 0]], logits)
    log_weights = REWARDS.clone() if attribute.evidence else REWARDS - 1
    log_weights[END] = 0.0
    expected = (logits + STRENGTH * log_weights).softmax(-1)
    torch.testing.assert_close(steered.softmax(-1), expected.float())
    numbers = Lookahead(hmm, attribute, HORIZON).tables.values
    assert numbers.shape == (HORIZON + 1, 1, 1, 1)


@pytest.mark.parametrize("horizon", [0, 64])
def test_constraints_hold(hmm: HMM, horizon: int) -> None:
    spelled = (b"a", b"b", b"", b"c")
    must, must_not = (Attribute.contains(text, spelled) for text in ("abba", "aa"))
    goal = plain_goal(hmm, must & ~must_not & Attribute.from_rewards(REWARDS), horizon)
    for seed in range(15):
        for limit in (4, 9):
            text = b"".join(spelled[token] for token in sample(goal, limit, seed))
            assert b"abba" in text
            assert b"aa" not in text
