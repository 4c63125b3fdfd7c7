"""Puts the commands' own help into the page of the command line, when the site is built."""

from typing import Any

import typer
from typer.cli import get_docs_for_click

from foretrace.cli import app

PLACE = "<!-- commands -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in the page that has the place for it."""
    if PLACE not in markdown:
        return markdown
    command = typer.main.get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="foretrace", indent=1)
    return markdown.replace(PLACE, text)
