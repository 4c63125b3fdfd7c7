"""The page that explains a text."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from foretrace.cli.explain_page import colour
from foretrace.cli.token_table import split_text


def decode(tokens: Sequence[int]) -> str:
    """Take tokens for bytes: characters may need several."""
    return bytes(tokens).decode("utf-8", "replace")


@given(st.text(st.characters(exclude_characters="�", exclude_categories=["Cs"])))
def test_pieces_make_up_the_text(text: str) -> None:
    tokens = list(text.encode())
    pieces = split_text(decode, tokens)
    assert len(pieces) == len(tokens)
    assert "".join(pieces) == text


def test_a_text_that_ends_within_a_character_is_shown_whole() -> None:
    assert split_text(decode, list("aé".encode()[:2])) == ["a", "�"]


def test_colours_go_from_orange_over_white_to_blue() -> None:
    assert colour(0.5) == (255, 255, 255)
    low, high = colour(0.0), colour(1.0)
    assert low[0] > low[2]
    assert high[2] > high[0]
