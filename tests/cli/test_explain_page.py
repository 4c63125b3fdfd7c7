"""The HTML page that explains a text."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from foretrace.cli.explain_page import eap_color
from foretrace.cli.token_table import split_text


def decode(tokens: Sequence[int]) -> str:
    """Decode tokens as UTF-8 bytes, so that a character may take several tokens."""
    return bytes(tokens).decode("utf-8", "replace")


@given(st.text(st.characters(exclude_characters="�", exclude_categories=["Cs"])))
def test_pieces_join_to_the_text(text: str) -> None:
    tokens = list(text.encode())
    pieces = split_text(decode, tokens)
    assert len(pieces) == len(tokens)
    assert "".join(pieces) == text


def test_incomplete_character_at_the_end_is_shown() -> None:
    assert split_text(decode, list("aé".encode()[:2])) == ["a", "�"]


def test_colors_go_from_orange_over_white_to_blue() -> None:
    assert eap_color(0.5) == (255, 255, 255)
    low, high = eap_color(0.0), eap_color(1.0)
    assert low[0] > low[2]
    assert high[2] > high[0]
