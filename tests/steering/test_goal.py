"""Goals: what they accept."""

from typing import Any

import pytest

from foretrace.errors import InvalidInputError
from foretrace.steering import Goal
from tiny_attributes import attributes


def test_a_goal_of_an_attribute_without_a_lookahead_is_refused() -> None:
    attribute: Any = attributes()["one"]
    with pytest.raises(InvalidInputError, match=r"pass Lookahead\(hmm, attribute\)"):
        Goal(attribute)
