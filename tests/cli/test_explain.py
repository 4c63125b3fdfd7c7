"""The pieces, colors and prices of an explanation."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers", reason="needs the extra `transformers`")

from foretrace.cli.explain import TokenTable, eap_color, split_text
from foretrace.engines.transformers.explain import Candidate, Choice
from forked import Run


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


def test_the_page_says_how_the_text_was_made(run: Run, steered: list[str], tmp_path: Path) -> None:
    page = tmp_path / "why.html"
    options = ["--goal", "odd", "--prompt", "w1", "--max-new-tokens", 12, "--html", page]
    done = run("explain", *steered, *options, "--seed", 5, "--top-p", 0.9)
    assert done.code == 0, done.err
    html = page.read_text("utf-8")
    for fact in (steered[0], steered[2], "level medium", "seed 5, temperature 1, top-p 0.9"):
        assert f"<dd>{fact}</dd>" in html
    bare = run("generate", steered[0], *options[2:6], "--seed", 5, "--top-p", 0.9, "--quiet")
    assert "Bare text from the same seed" in html
    assert bare.out.strip().removeprefix("w1") in html
    assert re.findall('<div class="axis">.*?</div>', html)[0].count("<span") == 5
    assert re.findall(r'left:[\d.]+%">(\d+)<', html) == ["1", "2", "4", "6", "8", "10", "12"]
    assert "<th>steered</th><th>word</th><th>lookahead</th></tr>" in html


def test_a_given_text_has_no_seed(run: Run, steered: list[str], tmp_path: Path) -> None:
    page = tmp_path / "why.html"
    done = run(
        "explain", *steered, "--goal", "odd", "--prompt", "w1", "--text", " w3", "--html", page
    )
    assert done.code == 0, done.err
    assert "seed" not in page.read_text("utf-8").split("</dl>")[0].split("<dl")[1]
    assert "Bare text" not in page.read_text("utf-8")
