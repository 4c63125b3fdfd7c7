"""Pages that scripts write are current."""

import cli_page
import compatibility


def test_the_page_of_commands() -> None:
    assert cli_page.PAGE.read_text("utf-8") == cli_page.page(), "run python tests/cli_page.py"


def test_the_page_of_what_works_in_which_engine() -> None:
    written = compatibility.PAGE.read_text("utf-8")
    assert written == compatibility.page(), "run python tests/compatibility.py"
