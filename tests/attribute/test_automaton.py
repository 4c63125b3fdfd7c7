"""Test deterministic finite automata."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.attribute import Attribute
from foretrace.attribute.automaton import DFA, UNREACHABLE
from foretrace.errors import InvalidInputError

VOCAB = 5
SEQUENCES = list(itertools.product(range(VOCAB), repeat=4))


@st.composite
def dfas(draw: st.DrawFn) -> DFA:
    """Draw a DFA over five tokens from the map of every token."""
    states = draw(st.integers(1, 4))
    maps = st.lists(st.integers(0, states - 1), min_size=states, max_size=states)
    table = torch.tensor([draw(maps) for _ in range(3)])
    index = torch.tensor([draw(st.integers(0, 2)) for _ in range(VOCAB)])
    return DFA.from_state_maps(table, index)


def final_states(dfa: DFA) -> list[int]:
    """Return the state after each sequence, one step at a time."""
    states = torch.zeros(len(SEQUENCES), dtype=torch.long)
    for tokens in torch.tensor(SEQUENCES).T:
        states = dfa.step(states, tokens)
    return states.tolist()


@settings(deadline=None, max_examples=60)
@given(dfas(), dfas())
def test_the_product_runs_both(one: DFA, other: DFA) -> None:
    product, left, right = one.product(other)
    states = final_states(product)
    assert left[states].tolist() == final_states(one)
    assert right[states].tolist() == final_states(other)


@settings(deadline=None, max_examples=60)
@given(dfas(), st.integers(0, 2**4 - 1))
def test_the_minimized_dfa_has_the_same_outputs(dfa: DFA, bits: int) -> None:
    outputs = torch.tensor([bits >> state & 1 for state in range(dfa.num_states)])
    minimized, representatives = dfa.minimized(outputs[None])
    assert minimized.num_states <= dfa.num_states
    expected = outputs[final_states(dfa)]
    assert torch.equal(outputs[representatives][final_states(minimized)], expected)
    again, _ = minimized.minimized(outputs[representatives][None])
    assert again.num_states == minimized.num_states


@settings(deadline=None, max_examples=60)
@given(dfas(), st.integers(0, 2**4 - 1))
def test_min_tokens_is_the_length_of_the_shortest_text(dfa: DFA, bits: int) -> None:
    accepting = torch.tensor([bool(bits >> state & 1) for state in range(dfa.num_states)])
    expected = UNREACHABLE
    states = {0}
    for length in range(dfa.num_states):
        if any(accepting[state] for state in states):
            expected = length
            break
        pairs = torch.tensor(list(itertools.product(states, range(VOCAB))))
        states = set(dfa.step(pairs[:, 0], pairs[:, 1]).tolist())
    assert int(dfa.min_tokens_to(accepting, VOCAB)[0]) == expected


def test_an_accepting_state_may_be_out_of_reach() -> None:
    assert UNREACHABLE == 2**31 - 1
    assert int(DFA.trivial().min_tokens_to(torch.tensor([False]), 4)[0]) == UNREACHABLE


def test_self_loops_keep_the_state() -> None:
    spelled = [b"", b"a", b"b"]
    must = Attribute.contains("ab", spelled).terms.without([2]).automaton
    assert must is not None
    states = torch.arange(must.dfa.num_states)
    assert torch.equal(must.dfa.step(states, torch.full_like(states, 2)), states)
    assert not torch.equal(must.dfa.step(states, torch.full_like(states, 1)), states)


def test_tokens_outside_the_vocabulary_are_dropped() -> None:
    dfa = DFA.from_state_maps(torch.tensor([[0, 1], [1, 1]]), torch.tensor([0, 0, 0, 1]))
    assert dfa.tokens.tolist() == [3]
    assert dfa.restricted(3).tokens.tolist() == []


@pytest.mark.parametrize(
    ("tokens", "classes", "transitions"),
    [
        ([1, 1], [1, 1], [[0, 0]]),
        ([2, 1], [1, 1], [[0, 0]]),
        ([-1], [1], [[0, 0]]),
        ([1], [1, 1], [[0, 0]]),
        ([1], [0], [[0, 0]]),
        ([1], [2], [[0, 0]]),
        ([1], [1], [[0, 1]]),
        ([1], [1], [[0, -1]]),
        ([], [], []),
        ([], [], [[0]] * 513),
    ],
)
def test_invalid_tables_are_refused(
    tokens: list[int], classes: list[int], transitions: list[list[int]]
) -> None:
    with pytest.raises(InvalidInputError, match="automaton"):
        DFA(*(torch.tensor(part, dtype=torch.int32) for part in (tokens, classes, transitions)))
