"""The pieces, colors and prices of an explanation."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers", reason="needs the extra `transformers`")

from foretrace.cli.explain import TokenTable, eap_color, split_text
from foretrace.engines.transformers.explain import Candidate, Choice


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


def test_relative_eaps_are_shown_around_one_half() -> None:
    """The EAP of evidence is relative to its mean: 1 stands for a token that changes nothing."""
    candidate = Candidate(1, 0.5, (0.8, 3.0), 0.5)
    choices = [Choice(candidate, (candidate,), (0.7, 1.0), price) for price in (0.1, 0.3)]
    table = TokenTable(["a", "b"], choices, str, frozenset({1}))
    assert table.on_scale(0, 0.8) == 0.8
    assert table.on_scale(1, 1.0) == 0.5
    assert table.shade(0) == pytest.approx(0.8 * 0.75)
    assert table.mean_price == pytest.approx(0.2)
