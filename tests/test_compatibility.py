"""The page of what works in which engine says what the tests show."""

import compatibility


def test_the_page_is_current() -> None:
    written = compatibility.PAGE.read_text("utf-8")
    assert written == compatibility.page(), "run python tests/compatibility.py"


def test_a_cell_is_yes_only_if_a_test_shows_it() -> None:
    cells = {(one.engine, one.feature) for one in compatibility.shown()}
    assert compatibility.PAGE.read_text("utf-8").count("**yes**") == len(cells)
    assert ("llama.cpp", "greedy") in cells
    assert not cells & compatibility.REASONS.keys()
