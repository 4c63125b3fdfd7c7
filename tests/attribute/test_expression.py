"""Expressions as text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.attribute import as_expression, parse
from foretrace.errors import InvalidInputError

MENTIONS = ["mentions()", 'mentions("a"', r'mentions("\x")', 'mentions("a", )']


class Shown:
    """An operand that writes down what is done to it."""

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
def test_signs_bind_as_in_python(text: str, expected: str) -> None:
    assert shown(text) == expected


def test_names_are_listed_once_in_order() -> None:
    assert parse("b & ~a | b").names == ("b", "a")


def test_mentions_are_operands_of_their_own() -> None:
    text = r'b & ~mentions("a \"b\" é", "\u00e9") | mentions ( "c" ) & mentions'
    found = parse(text)
    assert found.names == ("b", "mentions")
    assert [each.texts for each in found.mentions] == [('a "b" é', "é"), ("c",)]
    known = {name: Shown(name) for name in found.names}
    shown = found.build(known, lambda each: Shown("+".join(each.texts))).text
    assert shown == '((b&~a "b" é+é)|(c&mentions))'
    assert parse(f"{found.mentions[0]} & b").mentions == found.mentions[:1]
    with pytest.raises(InvalidInputError, match="needs a tokenizer"):
        found.build(known)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  ",
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
        "mentions()",
        'mentions("a"',
        'mentions("\\x")',
        'mentions("a", )',
    ],
)
def test_what_is_malformed_is_refused(text: str) -> None:
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
        (r'mentions("\x")', "not valid JSON"),
    ],
)
def test_parse_errors_say_what_and_where(text: str, problem: str) -> None:
    with pytest.raises(InvalidInputError, match=f"is not an expression: .*{problem}"):
        parse(text)


def test_an_unknown_name_is_named() -> None:
    with pytest.raises(InvalidInputError, match="no attribute called b"):
        parse("a & b").build({"a": Shown("a")})


def test_depth_has_no_limit_but_length_has() -> None:
    assert shown("(" * 4000 + "a" + ")" * 4000) == "a"
    with pytest.raises(InvalidInputError, match="characters at most"):
        parse("~" * 20_000 + "a")


@given(st.text(alphabet='ab~&|() "', max_size=12))
def test_python_agrees(text: str) -> None:
    """Whatever is accepted, Python reads in the same way."""
    try:
        ours = shown(text)
    except InvalidInputError:
        return
    if '"' not in text:
        names = {name: Shown(name) for name in parse(text).names}
        assert eval(text.strip(), {}, names).text == ours


@pytest.mark.parametrize("name", ["nontoxic", "user-17", "7th", "Twilight Sparkle", "A & B", "("])
def test_a_name_as_an_expression_is_read_as_that_name(name: str) -> None:
    assert parse(as_expression(name)).names == (name,)
