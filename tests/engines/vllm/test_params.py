"""What requests ask for: read, or refused with a reason; never anything else."""

import gc
from time import thread_time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foretrace.attribute import parse as parse_expression
from foretrace.engines.vllm.params import MAX_GOALS, MAX_NAMES, SteeringParams, parse
from foretrace.errors import InvalidInputError

NAMES = ["nontoxic", "user-17", '"Twilight Sparkle"', "x", 'mentions("a")']
SLOWEST = 0.05  # seconds of this thread's own: others may use the machine


def test_goals_and_numbers() -> None:
    assert parse(None) is None
    assert parse({"kv_transfer_params": {"a": 1}}) is None
    asked = parse({"goal": "a & ~b", "strength": 3, "shift": "-2.5", "horizon": 10, "other": 1})
    assert asked is not None
    assert asked.goals[0].expression.names == ("a", "b")
    assert (asked.goals[0].strength, asked.goals[0].shift, asked.horizon) == (3.0, -2.5, 10)
    several = parse({"goal": ["a", "b | c"], "strength": [1, 2], "shift": 4, "neutral_end": 1})
    assert several is not None
    assert [(goal.strength, goal.shift) for goal in several.goals] == [(1.0, 4.0), (2.0, 4.0)]
    assert several.neutral_end
    assert parse({"goal": "a", "neutral_end": "False"}) == parse({"goal": "a"})


def test_texts_that_must_occur_are_a_goal_of_their_own() -> None:
    asked = parse({"must_contain": ["a", "b"], "must_not_contain": "c", "strength": 3})
    assert asked is not None
    (goal,) = asked.goals
    assert goal.expression == parse_expression('mentions("a") & (mentions("b") & ~mentions("c"))')
    assert (goal.strength, goal.shift) == (3.0, 0.0)  # there is no other goal that it could be of
    joined = parse({"goal": "x", "strength": 2, "must_not_contain": ["c", "d"]})
    assert joined is not None
    assert [goal.strength for goal in joined.goals] == [2.0, 1.0]
    assert joined.goals[1].expression == parse_expression('~mentions("c", "d")')


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"strength": 3}, "without a goal"),
        ({"goals": "a", "strength": 3}, "Did you mean goal"),
        ({"Goal": "a"}, "Did you mean goal"),
        ({"goal": "a", "shift": -20_000}, "from -10000 to 10000"),
        ({"goal": "a", "shift": 20_000}, "from -10000 to 10000"),
        ({"goal": ""}, "must be an expression"),
        ({"goal": 5}, "must be an expression"),
        ({"goal": []}, "1 to"),
        ({"goal": ["a"] * (MAX_GOALS + 1)}, "1 to"),
        ({"goal": ["a"] * MAX_GOALS, "must_contain": "b"}, "and a required"),
        ({"must_contain": "a", "strength": "much"}, "must be a number"),
        ({"goal": "a &"}, "ends where a name"),
        ({"goal": "a" * 2000}, "characters at most"),
        ({"goal": "&".join(["a"] * (MAX_NAMES + 1))}, "times at most"),
        ({"goal": "a", "strength": 0}, "above 0"),
        ({"goal": "a", "strength": True}, "must be a number"),
        ({"goal": "a", "strength": float("nan")}, "must be a number"),
        ({"goal": "a", "strength": 10**400}, "must be a number"),
        ({"goal": "a", "strength": [1, 2]}, "2 values, for 1"),
        ({"goal": "a", "shift": "much"}, "must be a number"),
        ({"goal": "a", "horizon": -1}, "whole number"),
        ({"goal": "a", "horizon": 2.5}, "whole number"),
        ({"goal": "a", "neutral_end": "perhaps"}, "true or false"),
        ({"goal": "a", "neutral_end": [1]}, "true or false"),
        ({"must_contain": ""}, "must be a text"),
        ({"must_contain": []}, "must be a text"),
        ({"must_not_contain": ["a", 3]}, "must be a text"),
        ({"must_contain": "a" * 300}, "bytes together"),
        ({"must_contain": [*"abcdefghijklmnopq"]}, "16 required"),
        ({"must_contain": "\ud800"}, "characters"),
        ({"goal": 'mentions("a")', "must_contain": "b"}, "Join them by &"),
        ({"goal": 'mentions("\\ud800")'}, "characters"),
    ],
)
def test_what_is_wrong_is_said(given: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidInputError, match=why):
        parse(given)


def _expressions() -> st.SearchStrategy[str]:
    leaves = st.sampled_from(NAMES)
    inner = st.recursive(
        leaves,
        lambda part: st.one_of(
            part.map(lambda a: f"~{a}"),
            st.tuples(part, st.sampled_from([" & ", "|"]), part).map("".join),
            part.map(lambda a: f"({a})"),
        ),
        max_leaves=30,
    )
    noise = st.text(st.sampled_from('ab~&|()" \t-._1é\x00\ud800'), max_size=60)
    return st.one_of(inner, noise, st.text(max_size=200), st.text("~(", max_size=1200))


VALUES = st.one_of(
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.booleans(),
    st.none(),
    st.lists(st.one_of(st.integers(), st.floats(), st.text(max_size=5)), max_size=6),
)


def anything() -> st.SearchStrategy[dict[str, Any]]:
    """Make arguments of all kinds, many of them wrong."""
    numbers = st.one_of(st.integers(1, 60), st.floats(0.1, 50), VALUES)
    optional: dict[str, st.SearchStrategy[Any]] = {
        "goal": st.one_of(_expressions(), st.lists(_expressions(), max_size=5), VALUES),
        "strength": numbers,
        "shift": numbers,
        "horizon": numbers,
        "neutral_end": st.one_of(st.booleans(), VALUES),
        "must_contain": VALUES,
        "must_not_contain": VALUES,
    }
    return st.fixed_dictionaries({}, optional=optional)


@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)
@given(anything())
def test_anything_is_read_or_refused(given: dict[str, Any]) -> None:
    """`benchmarks/fuzz.py` does the same a hundred thousand times, and through admission."""
    gc.disable()  # what hypothesis leaves behind is not to be swept in this time
    try:
        began = thread_time()
        found = parse(given)
        assert found is None or isinstance(found, SteeringParams)
    except InvalidInputError:
        pass
    finally:
        taken = thread_time() - began
        gc.enable()
    assert taken < SLOWEST
