"""Test substring automata against a search in the bytes of the tokens."""

import functools
import itertools
import operator
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.attribute import Attribute
from foretrace.attribute.substring import byte_automaton
from foretrace.errors import InvalidInputError

SPELLED = [b"", b"a", b"b", b"ab", b"ba", b" a", b"bab", "é".encode()[:1], "é".encode()[1:]]
texts = st.text("ab é", min_size=1, max_size=5)


def contained(ids: tuple[int, ...], wanted: str) -> bool:
    return wanted.encode() in b"".join(SPELLED[token] for token in ids)


@settings(deadline=None, max_examples=60)
@given(st.lists(texts, min_size=1, max_size=3))
def test_a_substring_is_found_however_the_text_is_tokenized(wanted: list[str]) -> None:
    attribute = Attribute.contains(wanted, SPELLED)
    ids = list(itertools.product(range(len(SPELLED)), repeat=3))
    found = attribute.probability(torch.tensor(ids))
    expected = [any(contained(sequence, text) for text in wanted) for sequence in ids]
    assert found.tolist() == [float(value) for value in expected]


def is_word(character: str) -> bool:
    """Tell whether a character is part of a word, by the documented rule."""
    if character.isascii():
        return character.isalnum() or character == "_"
    return character.encode()[0] not in (0xC2, 0xE2, 0xF0)


def has_part(text: str, wanted: str, whole_word: bool, ignore_case: bool) -> bool:
    """Compare all parts of a text with a string."""
    for begin, end in itertools.combinations(range(len(text) + 1), 2):
        part = text[begin:end]
        same = part.casefold() == wanted.casefold() if ignore_case else part == wanted
        around = text[begin - 1 : begin] + text[end : end + 1]
        if same and not (whole_word and any(map(is_word, around))):
            return True
    return False


CHARACTERS = "aAsSß_1 .é—漢"
SPLIT = [bytes([byte]) for byte in range(256)]  # a token for each byte


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.text(CHARACTERS, min_size=1, max_size=3), min_size=1, max_size=2),
    st.booleans(),
    st.booleans(),
    st.lists(st.text(CHARACTERS, max_size=6), min_size=20, max_size=20),
)
def test_whole_words_and_any_case(
    wanted: list[str], whole_word: bool, ignore_case: bool, written: list[str]
) -> None:
    attribute = Attribute.contains(wanted, SPLIT, whole_word=whole_word, ignore_case=ignore_case)
    written += [
        f"{one}{wanted[0].swapcase()}{other}" for one in ("", " ", "a", "—") for other in "a."
    ]
    ids = [list(text.encode()) for text in written]
    expected = [
        any(has_part(text, one, whole_word, ignore_case) for one in wanted) for text in written
    ]
    assert attribute.probability(ids).tolist() == [float(value) for value in expected]


@pytest.mark.parametrize(
    ("wanted", "found", "not_found"),
    [
        ("straße", ["STRASSE", "Straße", "straẞe"], ["strase"]),
        ("STRASSE", ["straße"], ["straeße"]),
        ("kelvin", ["\N{KELVIN SIGN}elvin"], ["elvin"]),
        ("ÄRGER", ["ärger", "Ärger"], ["arger"]),
        (
            "\u03a3\u0391\u03a3",
            ["\u03c3\u03b1\u03c2"],
            ["\u03c3\u03b1"],
        ),  # Greek, with a final sigma
        ("𐐀", ["𐐨"], ["𐐩"]),
        ("\U00020000", ["\U00020000"], ["\U00020001"]),
    ],
)
def test_case_folding(wanted: str, found: list[str], not_found: list[str]) -> None:
    automaton = byte_automaton([wanted], ignore_case=True)
    assert all(automaton.accepts(f"x{text}y") for text in found)
    assert not any(automaton.accepts(f"x{text}y") for text in not_found)


def test_a_word_at_the_end_may_go_on() -> None:
    """A text that ends in the word has it, and one more letter takes it back."""
    spelled = [b"re", b"fund", b"ed", b"."]
    word = Attribute.contains("refund", spelled, whole_word=True)
    ids = [[0, 1], [0, 1, 2], [0, 1, 3], [0, 1, 3, 2], [0, 1, 2, 3, 0, 1]]
    assert word.probability(ids).tolist() == [1.0, 0.0, 1.0, 1.0, 1.0]


@settings(deadline=None, max_examples=40)
@given(texts, texts, st.integers(0, 10**6))
def test_combined_constraints_are_one_term(one: str, other: str, seed: int) -> None:
    """Every combination of 0 and 1 is 0 or 1 exactly."""
    a, b = Attribute.contains(one, SPELLED), Attribute.contains(other, SPELLED)
    drawn = random.Random(seed)
    ids = [tuple(drawn.choices(range(len(SPELLED)), k=5)) for _ in range(50)]
    has = [(contained(sequence, one), contained(sequence, other)) for sequence in ids]
    for joined, expected in (
        (a & b, [x and y for x, y in has]),
        (a | b, [x or y for x, y in has]),
        (~a & b, [not x and y for x, y in has]),
        (~(a | ~b), [not (x or not y) for x, y in has]),
    ):
        assert len(joined.terms) <= 1
        assert joined.probability(list(map(list, ids))).tolist() == [float(x) for x in expected]


def test_constraints_combine_with_token_weights() -> None:
    weights = torch.rand(len(SPELLED), generator=torch.Generator().manual_seed(0)).double()
    weighted, must = Attribute.from_weights(weights), Attribute.contains("aba", SPELLED)
    ids = torch.tensor(list(itertools.product(range(len(SPELLED)), repeat=3)))
    p, q = weighted.probability(ids), must.probability(ids)
    for joined, expected in (
        (weighted & must, p * q),
        (weighted | must, p + q - p * q),
        (~weighted & ~must, (1 - p) * (1 - q)),
        (~(weighted & must), 1 - p * q),
    ):
        torch.testing.assert_close(joined.probability(ids), expected, rtol=0, atol=1e-12)


def test_an_expression_that_is_always_true_needs_no_automaton() -> None:
    must = Attribute.contains("ab", SPELLED)
    assert (must | ~must).terms.automaton is None
    assert len((must & ~must).terms) == 0  # true of no text
    assert (~~must) is must
    twice = (must & must).terms.automaton
    assert twice is not None
    assert twice.dfa.num_states == 3  # as many as for one


def test_the_fewest_tokens_to_an_accepting_state() -> None:
    must = Attribute.contains("abab", SPELLED).terms.automaton
    assert must is not None
    assert int(must.min_tokens(len(SPELLED))[0]) == 2  # ab, ab


@pytest.mark.parametrize("wrong", [[], [""], ["a", ""], ["a" * 1025]])
def test_invalid_substrings_are_refused(wrong: list[str]) -> None:
    with pytest.raises(InvalidInputError, match=r"[Tt]ext"):
        Attribute.contains(wrong, SPELLED)


def test_too_many_states_are_refused() -> None:
    drawn = random.Random(0)
    parts = [Attribute.contains("".join(drawn.choices("ab", k=40)), SPELLED) for _ in range(6)]
    with pytest.raises(InvalidInputError, match="states"):
        functools.reduce(operator.and_, parts)
