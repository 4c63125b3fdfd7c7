"""What requests ask for: read, or refused with a reason; never anything else."""

import gc
from time import thread_time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foretrace.attribute import LogitAffine
from foretrace.engines.vllm.params import MAX_GOALS, MAX_NAMES, SteeringParams, parse
from foretrace.errors import InvalidInputError
from foretrace.steering.goal_text import GoalText

NAMES = ["nontoxic", "user-17", '"Twilight Sparkle"', "x", 'contains("a")']
SLOWEST = 0.05  # seconds of this thread's own: others may use the machine


def _read(**arguments: Any) -> SteeringParams:
    params = parse(arguments)
    assert params is not None
    return params


def _operands(goal: GoalText) -> list[tuple[str, float | str]]:
    """Return each operand's expression, and its strength or level."""
    return [(str(one.expression), one.strength or one.level) for one in goal.operands]


def test_requests_without_a_goal_are_not_steered() -> None:
    assert parse(None) is None
    assert parse({"kv_transfer_params": {"a": 1}}) is None


def test_a_goal_has_the_medium_level_and_a_neutral_end_by_default() -> None:
    params = _read(goal="a & b", horizon=10, other=1)
    (goal,) = params.goals
    assert _operands(goal) == [("a", "medium"), ("b", "medium")]
    assert goal.transform.is_identity
    assert (params.horizon, params.neutral_end) == (10, True)
    assert _read(goal="a", neutral_end="true") == _read(goal="a", neutral_end=1) == _read(goal="a")
    assert not _read(goal="a", neutral_end="False").neutral_end


def test_a_list_of_goals_is_one_conjunction() -> None:
    (goal,) = _read(goal=["b | c", "a"], strength=[1, "2.5"]).goals
    assert _operands(goal) == [("(b | c)", 1.0), ("a", 2.5)]
    assert _read(goal=["a", "b"], strength=3) == _read(goal="b & a", strength=3)
    assert _read(goal=["b", "a"], level="mild") == _read(goal="~~a & b", level="mild")
    assert _read(goal="~~(a & b)") == _read(goal="a & b")
    assert _read(goal="a & a") != _read(goal="a")


@pytest.mark.parametrize(
    ("strength", "rounded"),
    [(5, 5), (2.44, 2.4), (2.45001, 2.5), (0.12345, 0.12), (123.4, 120), (999.9, 1000), (1.0, 1)],
)
def test_strengths_have_two_significant_digits(strength: float, rounded: float) -> None:
    (goal,) = _read(goal="a", strength=strength).goals
    assert _operands(goal) == [("a", rounded)]


def test_with_transforms_every_goal_is_one_of_its_own() -> None:
    params = _read(goal=["a & b", "c"], transform=[[10, -10], [2, 0]], must_contain="x")
    first, second, required = params.goals
    assert _operands(first) == [("a", 1.0), ("b", 1.0)]
    assert (first.transform, second.transform) == (LogitAffine(10, -10), LogitAffine(2, 0))
    assert required.transform.is_identity
    for written in ([10, -10], [[10, -10]], ["10", -10.0], [10, -10, 10, -10]):
        goals = _read(goal=["a", "c"], transform=written).goals
        assert [goal.transform for goal in goals] == [LogitAffine(10, -10)] * 2
    (alone,) = _read(must_contain="x", transform=[1.5, 0]).goals
    assert alone.transform == LogitAffine(1.5, 0)


def test_a_window_is_a_number_of_tokens_or_a_marker() -> None:
    params = _read(goal="a", after="</think>", window=64.0)
    assert (params.after, params.window, params.markers) == ("</think>", 64, ("</think>",))
    assert _read(goal="a", window="64").window == "64"
    assert _read(goal="a").markers == ()


def test_required_and_forbidden_texts_are_operands_of_strength_1() -> None:
    params = _read(must_contain=["a", "b"], must_not_contain="c", strength=3)
    (goal,) = params.goals
    expected = [('contains("a")', 1.0), ('contains("b")', 1.0), ('~contains("c")', 1.0)]
    assert _operands(goal) == expected
    assert params == _read(goal='contains("a") & (contains("b") & ~contains("c"))', level="strong")
    (joined,) = _read(goal="x", strength=2, must_not_contain=["c", "d"]).goals
    assert _operands(joined) == [('~contains("c", "d")', 1.0), ("x", 2.0)]
    loose = _read(must_contain="a", must_not_contain="b", whole_words=True, ignore_case="true")
    options = "whole_word=True, ignore_case=True"
    assert loose == _read(goal=f'contains("a", {options}) & ~contains("b", {options})')
    (several,) = _read(goal='contains("a")', must_contain="b").goals
    assert len(several.operands) == 2


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"strength": 3}, "without a goal"),
        ({"goals": "a", "strength": 3}, "Did you mean goal"),
        ({"Goal": "a"}, "Did you mean goal"),
        ({"goal": "a", "shift": -3}, r"transform: \[scale, shift\]"),
        ({"goal": "a", "transform": [2, -20_000]}, "from -10000 to 10000"),
        ({"goal": "a", "transform": [2000, 0]}, "scale of a transform .* from 0 to 1000"),
        ({"goal": "a", "transform": [0, 1]}, "above 0"),
        ({"goal": "a", "transform": 3}, r"\[scale, shift\]"),
        ({"goal": "a", "transform": []}, r"\[scale, shift\]"),
        ({"goal": "a", "transform": [1, 2, 3]}, r"\[scale, shift\]"),
        ({"goal": "a", "transform": [[1, 2], [3, 4]]}, "list of 1 such"),
        ({"goal": "a", "transform": [[1, 2], 3]}, "must be a number"),
        ({"goal": "a", "transform": ["much", 2]}, "must be a number"),
        ({"goal": "a", "transform": [1, 2], "strength": 2}, "exclude each other"),
        ({"goal": "a", "transform": [1, 2], "level": "mild"}, "exclude each other"),
        ({"goal": "a", "strength": 2, "level": "mild"}, "exclude each other"),
        ({"goal": "a", "level": "much"}, "one of mild, medium, strong"),
        ({"goal": "a", "level": 3}, "one of mild, medium, strong"),
        ({"goal": "a", "level": ["mild"]}, "one of mild, medium, strong"),
        ({"goal": ""}, "must be an expression"),
        ({"goal": 5}, "must be an expression"),
        ({"goal": []}, "1 to"),
        ({"goal": ["a"] * (MAX_GOALS + 1)}, "1 to"),
        ({"goal": ["a"] * MAX_GOALS, "must_contain": "b"}, "and a required"),
        ({"must_contain": "a", "strength": "much"}, "must be a number"),
        ({"goal": "a &"}, "ends where a name"),
        ({"goal": "a" * 2000}, "characters at most"),
        ({"goal": "&".join(["a"] * (MAX_NAMES + 1))}, "times at most"),
        ({"goal": "a", "strength": 0}, "from 0.01 to 1000"),
        ({"goal": "a", "strength": True}, "must be a number"),
        ({"goal": "a", "strength": float("nan")}, "must be a number"),
        ({"goal": "a", "strength": 10**400}, "must be a number"),
        ({"goal": "a", "strength": [1, 2]}, "2 values, for 1"),
        ({"goal": "a", "strength": 1e-300}, "from 0.01 to 1000"),
        ({"goal": "a", "strength": 2_000}, "from 0.01 to 1000"),
        ({"goal": "a", "horizon": -1}, "whole number"),
        ({"goal": "a", "horizon": 2.5}, "whole number"),
        ({"goal": "a", "neutral_end": "perhaps"}, "true or false"),
        ({"goal": "a", "neutral_end": [1]}, "true or false"),
        ({"must_contain": "a", "ignore_case": "perhaps"}, "ignore_case must be true or false"),
        ({"goal": "a", "whole_words": 2}, "whole_words must be true or false"),
        ({"ignore_case": True}, "ignore_case is given without a goal"),
        ({"after": "</think>"}, "after is given without a goal"),
        ({"goal": "a", "after": ""}, "after must be a text such as </think>"),
        ({"goal": "a", "after": 3}, "after must be a text"),
        ({"goal": "a", "after": ["b"]}, "after must be a text"),
        ({"goal": "a", "after": "\ud800"}, "after must be a text"),
        ({"goal": "a", "after": "a" * 300}, "after may have 200 bytes"),
        ({"goal": "a", "window": 0}, "window must be a number from 1"),
        ({"goal": "a", "window": True}, "window must be a number from 1"),
        ({"goal": "a", "window": 2.5}, "whole number"),
        ({"goal": "a", "window": ""}, "window must be a text"),
        ({"must_contain": ""}, "must be a text"),
        ({"must_contain": []}, "must be a text"),
        ({"must_not_contain": ["a", 3]}, "must be a text"),
        ({"must_contain": "a" * 300}, "bytes together"),
        ({"must_contain": [*"abcdefghijklmnopq"]}, "16 required"),
        ({"must_contain": ["a"] * 65}, "65 values, but 64"),
        ({"goal": "a", "after": "a" * 2000}, "1,000 characters at most"),
        ({"must_contain": "\ud800"}, "characters"),
        ({"goal": 'contains("a")', "must_contain": "b", "transform": [2, 0]}, "Join them by &"),
        ({"goal": 'contains("\\ud800")'}, "characters"),
    ],
)
def test_what_is_wrong_is_said(given: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidInputError, match=why):
        parse(given)


@pytest.mark.parametrize(
    "given",
    [
        {"must_contain": [f"t{i}" for i in range(64_000)]},
        {"must_not_contain": ["t"] * 1_000_000},
        {"must_contain": "a" * 30_000_000},
        {"must_contain": ["\ud800" * 10_000_000]},
        {"goal": "a", "after": "a" * 30_000_000},
        {"goal": "a", "window": "é" * 10_000_000},
        {"goal": "~" * 10_000_000},
        {"goal": ["a"] * 1_000_000},
        {"goal": "a", "strength": "9" * 10_000_000},
        {"goal": "a", "strength": [1] * 1_000_000},
        {"goal": "a", "level": "m" * 30_000_000},
        {"goal": "a", "transform": [[1, 2]] * 1_000_000},
    ],
    ids=lambda given: next(reversed(given)),
)
def test_what_is_too_long_is_refused_at_once(given: dict[str, Any]) -> None:
    began = thread_time()
    with pytest.raises(InvalidInputError, match=r"at most|1 to 4"):
        parse(given)
    assert thread_time() - began < SLOWEST


def test_texts_that_are_given_again_count_once() -> None:
    assert _read(must_contain=["t"] * 64) == _read(must_contain="t")
    assert _read(must_contain=["t", "u", "t"], must_not_contain=["v", "v"]) == _read(
        goal='contains("t") & contains("u") & ~contains("v") & contains("t")'
    )
    assert _read(must_contain=["t", "u"], goal='~contains("v")').required == [["t"], ["u"]]


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
        "level": st.one_of(st.sampled_from(["mild", "medium", "strong"]), VALUES),
        "transform": st.one_of(
            st.tuples(numbers, numbers).map(list),
            st.lists(st.tuples(numbers, numbers).map(list), max_size=5),
            VALUES,
        ),
        "horizon": numbers,
        "neutral_end": st.one_of(st.booleans(), VALUES),
        "must_contain": VALUES,
        "must_not_contain": VALUES,
        "after": VALUES,
        "window": st.one_of(numbers, VALUES),
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
