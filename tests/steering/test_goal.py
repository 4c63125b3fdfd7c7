"""Goals: what they accept, and what the goals of a batch share."""

from typing import Any

import pytest

from foretrace.errors import InvalidInputError
from foretrace.lookahead import Lookahead
from foretrace.steering import Goal
from foretrace.steering.conjunction import conjunction
from foretrace.steering.goal import common_hmm
from tiny import tiny_hmm
from tiny_attributes import attributes


def test_a_goal_of_an_attribute_without_a_lookahead_is_refused() -> None:
    attribute: Any = attributes()["one"]
    with pytest.raises(InvalidInputError, match=r"pass Lookahead\(hmm, attribute\)"):
        Goal(attribute)


def test_goals_of_a_batch_share_an_hmm() -> None:
    hmm, other = tiny_hmm("dense"), tiny_hmm("dense")
    first, second, third = (
        Goal(Lookahead(one, attributes()[name], 3))
        for one, name in ((hmm, "one"), (hmm, "not"), (other, "one"))
    )
    assert common_hmm([]) is None
    assert common_hmm([first, second]) is hmm
    assert common_hmm([third]) is other
    with pytest.raises(InvalidInputError, match=r"^All goals of a batch must use the same HMM obj"):
        common_hmm([first, third])


def test_a_conjunction_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"^There is no goal\. Name at least one"):
        conjunction([], {}, None, tiny_hmm("dense"))
