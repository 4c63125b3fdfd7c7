"""Requests: limits, horizons and end tokens."""

import pytest
import torch

from foretrace.errors import InvalidInputError
from foretrace.lookahead import Lookahead
from foretrace.steering import PrefixTracker, Request
from foretrace.steering.request import require_single_constraint
from goals import plain_goal
from oracle.neutral_end import padded_ends
from tiny import TOKENS, tiny_hmm
from tiny_attributes import attributes


@pytest.mark.parametrize("name", ["one", "all"])
def test_a_request_looks_no_further_than_its_horizon(name: str) -> None:
    """It is steered as with a lookahead of that horizon, and not as with a longer one."""
    hmm, logits, steered = tiny_hmm("dense"), torch.zeros(1, TOKENS, dtype=torch.float64), []
    for lookahead_horizon, horizon in ((8, 2), (2, None), (8, None)):
        goal = plain_goal(Lookahead(hmm, attributes()[name], lookahead_horizon))
        tracker = PrefixTracker(hmm)
        tracker.step([Request((goal,), (1,), 9, horizon)], [[3]])
        steered.append(tracker.reweight(logits).log_softmax(-1))
    assert torch.equal(steered[0], steered[1])
    assert not torch.allclose(steered[0], steered[2])


def test_the_tokens_ahead_end_with_the_limit() -> None:
    request = Request((), (), limit=5, horizon=3)
    assert [request.tokens_after_next(count) for count in (0, 1, 4, 5, 9)] == [4, 3, 0, 0, 0]
    assert [request.tokens_ahead(count) for count in (0, 1, 2, 4, 9)] == [3, 3, 2, 0, 0]
    assert Request((), (), limit=5).tokens_ahead(0) == 4


def test_at_most_one_goal_has_a_constraint() -> None:
    for count in (0, 1):
        require_single_constraint(count)
    with pytest.raises(InvalidInputError, match=r"2 goals .* Join them by &"):
        require_single_constraint(2)


def test_end_tokens_are_padded_to_one_width() -> None:
    requests = [Request((), (), 9, ends=ends) for ends in ((1, 2), (), (3, 7), (-1,), (0, 1, 2))]
    assert padded_ends(requests, vocab_size=4) == ([0, 2, 4], [[1, 2, 1], [3, 3, 3], [0, 1, 2]])
    assert padded_ends(requests[1:2], vocab_size=4) == ([], [])
