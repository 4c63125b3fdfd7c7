"""Automata, and texts that occur: against search in what is spelled."""

import functools
import itertools
import operator
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.attribute import Attribute
from foretrace.attribute.automata.dfa import DFA
from foretrace.errors import InvalidInputError

SPELLED = [b"", b"a", b"b", b"ab", b"ba", b" a", b"bab", "é".encode()[:1], "é".encode()[1:]]
texts = st.text("ab é", min_size=1, max_size=5)


def contained(ids: tuple[int, ...], wanted: str) -> bool:
    return wanted.encode() in b"".join(SPELLED[token] for token in ids)


@settings(deadline=None, max_examples=60)
@given(st.lists(texts, min_size=1, max_size=3))
def test_a_text_occurs_however_it_is_cut(wanted: list[str]) -> None:
    attribute = Attribute.occurrence(wanted, SPELLED)
    ids = list(itertools.product(range(len(SPELLED)), repeat=3))
    found = attribute.probability(torch.tensor(ids))
    expected = [any(contained(each, text) for text in wanted) for each in ids]
    assert found.tolist() == [float(each) for each in expected]


@settings(deadline=None, max_examples=40)
@given(texts, texts, st.integers(0, 10**6))
def test_constraints_join_to_one_term(one: str, other: str, seed: int) -> None:
    """Whatever the signs, 0 and 1 stay 0 and 1: there is nothing to approximate."""
    a, b = Attribute.occurrence(one, SPELLED), Attribute.occurrence(other, SPELLED)
    drawn = random.Random(seed)
    ids = [tuple(drawn.choices(range(len(SPELLED)), k=5)) for _ in range(50)]
    has = [(contained(each, one), contained(each, other)) for each in ids]
    for joined, expected in (
        (a & b, [x and y for x, y in has]),
        (a | b, [x or y for x, y in has]),
        (~a & b, [not x and y for x, y in has]),
        (~(a | ~b), [not (x or not y) for x, y in has]),
    ):
        assert len(joined.terms) <= 1
        assert joined.probability(list(map(list, ids))).tolist() == [float(x) for x in expected]


def test_with_weights_they_multiply() -> None:
    weights = torch.rand(len(SPELLED), generator=torch.Generator().manual_seed(0)).double()
    weighed, must = Attribute.from_weights(weights), Attribute.occurrence("aba", SPELLED)
    ids = torch.tensor(list(itertools.product(range(len(SPELLED)), repeat=3)))
    p, q = weighed.probability(ids), must.probability(ids)
    for joined, expected in (
        (weighed & must, p * q),
        (weighed | must, p + q - p * q),
        (~weighed & ~must, (1 - p) * (1 - q)),
        (~(weighed & must), 1 - p * q),
    ):
        torch.testing.assert_close(joined.probability(ids), expected, rtol=0, atol=1e-12)


def test_what_is_always_true_needs_no_memory() -> None:
    must = Attribute.occurrence("ab", SPELLED)
    assert (must | ~must).terms.automaton is None
    assert len((must & ~must).terms) == 0  # of no text
    assert (~~must) is must
    twice = (must & must).terms.automaton
    assert twice is not None
    assert twice.dfa.num_states == 3  # as few as of one


def test_how_many_tokens_it_takes() -> None:
    must = Attribute.occurrence("abab", SPELLED).terms.automaton
    assert must is not None
    fewest = must.min_tokens(len(SPELLED))
    assert int(fewest[0]) == 2  # ab, ab
    never = DFA.trivial().min_tokens_to(torch.tensor([False]), 4)
    assert int(never[0]) == 2**31 - 1


def test_tokens_can_be_passed_by() -> None:
    must = Attribute.occurrence("ab", SPELLED).terms.without([2]).automaton
    assert must is not None
    states = torch.arange(must.dfa.num_states)
    assert torch.equal(must.dfa.step(states, torch.full_like(states, 2)), states)
    assert not torch.equal(must.dfa.step(states, torch.full_like(states, 1)), states)


@pytest.mark.parametrize("wrong", [[], [""], ["a", ""], ["a" * 1025]])
def test_refused(wrong: list[str]) -> None:
    with pytest.raises(InvalidInputError, match=r"[Tt]ext"):
        Attribute.occurrence(wrong, SPELLED)


def test_too_many_states_are_refused() -> None:
    drawn = random.Random(0)
    parts = [Attribute.occurrence("".join(drawn.choices("ab", k=40)), SPELLED) for _ in range(6)]
    with pytest.raises(InvalidInputError, match="states"):
        functools.reduce(operator.and_, parts)
