"""Test expressions as text, and their normal form."""

import itertools
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.attribute import Attribute, as_expression, parse
from foretrace.attribute.expression import Contains, Expression, Operator
from foretrace.errors import InvalidInputError


class Shown:
    """An operand that records the operations on it."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __and__(self, other: "Shown") -> "Shown":
        return Shown(f"({self.text}&{other.text})")

    def __or__(self, other: "Shown") -> "Shown":
        return Shown(f"({self.text}|{other.text})")

    def __invert__(self) -> "Shown":
        return Shown(f"~{self.text}")


def shown(text: str) -> str:
    expression = parse(text)
    return expression.build({name: Shown(name) for name in expression.names}).text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", "a"),
        (" a & b|c ", "((a&b)|c)"),
        ("a | b & c", "(a|(b&c))"),
        ("a & b & c", "((a&b)&c)"),
        ("~a & b", "(~a&b)"),
        ("~(a & b)", "~(a&b)"),
        ("~~a | ~(b)", "(~~a|~b)"),
        ("(a | b) & ((c))", "((a|b)&c)"),
        ('"Twilight Sparkle" & user-17', "(Twilight Sparkle&user-17)"),
        ('"&" & größe.v2', "(&&größe.v2)"),
    ],
)
def test_operators_bind_as_in_python(text: str, expected: str) -> None:
    assert shown(text) == expected


def test_names_are_listed_once_in_order() -> None:
    assert parse("b & ~a | b").names == ("b", "a")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("a & ~b", "a"), ("~(a | ~b)", "b"), ('~~a & contains("x")', "a"), ("a & ~a", "a")],
)
def test_names_under_a_negation_are_not_wanted(text: str, wanted: str) -> None:
    assert parse(text).wanted == set(wanted)


def test_contains_is_an_operand() -> None:
    text = r'b & ~contains("a \"b\" é", "\u00e9") | mentions ( "c" ) & contains'
    found = parse(text)
    assert found.names == ("b", "contains")
    assert [operand.texts for operand in found.contains] == [('a "b" é', "é"), ("c",)]
    known = {name: Shown(name) for name in found.names}
    shown = found.build(known, lambda operand: Shown("+".join(operand.texts))).text
    assert shown == '((b&~a "b" é+é)|(c&contains))'
    assert parse(f"{found.contains[0]} & b").contains == found.contains[:1]
    with pytest.raises(InvalidInputError, match="needs a tokenizer"):
        found.build(known)


def test_options_of_contains() -> None:
    text = (
        'contains("a", "b", ignore_case=True, whole_word = true) & ~contains("c",whole_word=False)'
    )
    first, second = parse(text).contains
    assert first == Contains(("a", "b"), whole_word=True, ignore_case=True)
    assert second == Contains(("c",))
    assert parse(str(first)).contains == (first,)
    assert parse(text).normalized().contains == (first, second)


@pytest.mark.parametrize(
    ("required", "forbidden", "expected"),
    [
        (Contains(("refund",)), Contains(("fund",)), True),
        (Contains(("refund", "money")), Contains(("fund",)), False),
        (Contains(("refund", "funds")), Contains(("x", "fund")), True),
        (Contains(("Refund",)), Contains(("refund",)), False),
        (Contains(("Refund",)), Contains(("refund",), ignore_case=True), True),
        (Contains(("refund",), ignore_case=True), Contains(("refund",)), False),
        (Contains(("refund",), ignore_case=True), Contains(("FUND",), ignore_case=True), True),
        (Contains(("a refund now",)), Contains(("refund",), whole_word=True), True),
        (Contains(("refund",)), Contains(("refund",), whole_word=True), False),
        (Contains(("refund",), whole_word=True), Contains(("refund",), whole_word=True), True),
        (Contains(("refunds",), whole_word=True), Contains(("refund",), whole_word=True), False),
    ],
)
def test_required_text_contradicts_forbidden_text(
    required: Contains, forbidden: Contains, expected: bool
) -> None:
    assert required.contradicts(forbidden) is expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  ",
        'contains("a", whole_word)',
        'contains("a", whole_word=1)',
        'contains("a", case=True)',
        'contains(whole_word=True, "a")',
        "a b",
        "a &",
        "& a",
        "a ~ b",
        "(a",
        "a)",
        "()",
        "a && b",
        "a + b",
        '"a',
        "1a",
        "~",
        "contains()",
        'contains("a"',
        'contains("\\x")',
        'contains("a", )',
    ],
)
def test_malformed_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not an expression"):
        parse(text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a && b", "unexpected '&' at column 4"),
        ("  & a", "unexpected '&' at column 3"),
        ("a b", "unexpected 'b' at column 3"),
        ("a  +", r"unexpected '\+' at column 4"),
        ("(a))", r"unexpected '\)' at column 4"),
        ("a & ", "it ends where a name was expected"),
        ("(a", "a parenthesis is not closed"),
        (r'contains("\x")', "not valid JSON"),
    ],
)
def test_parse_errors_say_what_and_where(text: str, problem: str) -> None:
    with pytest.raises(InvalidInputError, match=f"is not an expression: .*{problem}"):
        parse(text)


def test_the_error_names_an_unknown_attribute() -> None:
    with pytest.raises(InvalidInputError, match="no attribute called b"):
        parse("a & b").build({"a": Shown("a")})


def test_nesting_is_not_limited_but_length_is() -> None:
    assert shown("(" * 4000 + "a" + ")" * 4000) == "a"
    with pytest.raises(InvalidInputError, match="characters at most"):
        parse("~" * 20_000 + "a")


@given(st.text(alphabet='ab~&|() "', max_size=12))
def test_python_agrees(text: str) -> None:
    """Python evaluates every accepted expression in the same way."""
    try:
        ours = shown(text)
    except InvalidInputError:
        return
    if '"' not in text:
        names = {name: Shown(name) for name in parse(text).names}
        assert eval(text.strip(), {}, names).text == ours


@pytest.mark.parametrize("name", ["nontoxic", "user-17", "7th", "Twilight Sparkle", "A & B", "("])
def test_a_name_as_an_expression_is_parsed_as_that_name(name: str) -> None:
    assert parse(as_expression(name)).names == (name,)


SPELLED = [b"a", b"b", b"ab"]
TEXTS = list(itertools.product(range(3), repeat=3))
LEAVES = ["a", "b", "small talk", Contains(("ab", "ba")), Contains(("b",))]
Tree = Any  # a leaf, ("~", tree), or ("&" or "|", tree, tree)

trees = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.tuples(st.just("~"), inner) | st.tuples(st.sampled_from("&|"), inner, inner),
    max_leaves=6,
)


def postfix(tree: Tree) -> Expression:
    if not isinstance(tree, tuple):
        return Expression((tree,))
    steps = [step for operand in tree[1:] for step in postfix(operand).steps]
    return Expression((*steps, Operator(tree[0])))


def rearranged(tree: Tree, draws: random.Random) -> Tree:
    """Return an equivalent tree: other orders, other groupings, and double negations."""
    if draws.random() < 0.2:
        return ("~", ("~", rearranged(tree, draws)))
    if not isinstance(tree, tuple):
        return Contains(tree.texts[::-1]) if isinstance(tree, Contains) else tree
    if tree[0] == "~":
        return ("~", rearranged(tree[1], draws))
    operands = [rearranged(operand, draws) for operand in chained(tree, tree[0])]
    while len(operands) > 1:
        draws.shuffle(operands)
        operands.append((tree[0], operands.pop(), operands.pop()))
    return operands[0]


def chained(tree: Tree, operator: str) -> list[Tree]:
    if not isinstance(tree, tuple) or tree[0] != operator:
        return [tree]
    return [operand for side in tree[1:] for operand in chained(side, operator)]


@given(trees, st.integers(0, 10**6))
def test_order_and_grouping_do_not_change_the_normal_form(tree: Tree, seed: int) -> None:
    normal = postfix(tree).normalized()
    assert postfix(rearranged(tree, random.Random(seed))).normalized() == normal
    assert normal.normalized() == normal
    assert parse(str(normal)) == normal


@given(trees)
def test_an_expression_is_parsed_back_from_its_text(tree: Tree) -> None:
    assert parse(str(postfix(tree))) == postfix(tree)


@settings(deadline=None, max_examples=60)
@given(trees)
def test_the_normal_form_has_the_same_probability(tree: Tree) -> None:
    weights = {"a": [0.5, 1.0, 0.25], "b": [1.0, 0.3, 0.9], "small talk": [0.7, 0.6, 1.0]}
    attributes = {name: Attribute.from_weights(row) for name, row in weights.items()}

    def build(expression: Expression) -> Attribute:
        return expression.build(
            attributes, lambda operand: Attribute.contains(operand.texts, SPELLED)
        )

    expected = build(postfix(tree)).probability(TEXTS)
    found = build(postfix(tree).normalized()).probability(TEXTS)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("b & a", "(a & b)"),
        ("a & (b & c)", "((a & b) & c)"),
        ("~~a", "a"),
        ("~~(b | a) | ~~~c", "((a | b) | ~c)"),
        ("~(b & a)", "~(a & b)"),
        ("a & a", "(a & a)"),
        ("a | a & a", "((a & a) | a)"),
        ('a & contains("y", "x", "y")', '(contains("x", "y") & a)'),
        ('"&" & a', '("&" & a)'),
    ],
)
def test_normal_forms(text: str, expected: str) -> None:
    assert str(parse(text).normalized()) == expected


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a & a", "a"),
        ("a & b", "a | b"),
        ("a & (b | c)", "(a & b) | c"),
        ("~(a & b)", "~a & ~b"),
        ("a", '"a "'),
        ('contains & "x"', 'contains("x")'),
    ],
)
def test_other_expressions_have_other_normal_forms(one: str, other: str) -> None:
    assert parse(one).normalized() != parse(other).normalized()


@pytest.mark.parametrize(
    "text",
    [
        "~" * 9_999 + "a",
        "&".join(["ab"] * 3_000),
        "ab&(" * 1_500 + "a" + ")" * 1_500,
        "a&(b|(" * 1_200 + "a" + "))" * 1_200,
    ],
)
def test_long_expressions_have_a_normal_form(text: str) -> None:
    normal = parse(text).normalized()
    assert normal.normalized() == normal
