"""MkDocs hook: insert the generated help of all commands into the command-line page."""

from typing import Any

import typer
from typer.cli import get_docs_for_click

from foretrace.cli import app

PLACEHOLDER = "<!-- commands -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the placeholder, if the page has one, by the help of all commands."""
    if PLACEHOLDER not in markdown:
        return markdown
    command = typer.main.get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="foretrace", indent=1)
    return markdown.replace(PLACEHOLDER, text)
