"""The page of all commands says what their help says."""

import cli_page


def test_the_page_is_current() -> None:
    assert cli_page.PAGE.read_text("utf-8") == cli_page.page(), "run python tests/cli_page.py"
