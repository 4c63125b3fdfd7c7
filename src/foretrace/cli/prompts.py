"""Read prompts from a file."""

from pathlib import Path


def read_prompts(file: Path, column: str | None = None) -> list[str]:
    """Read a column of a table: by default `prompt` if there is one, else `text`."""
    from foretrace import _tabular

    rows = _tabular.read_rows(file, [column] if column else [])
    name = column or ("prompt" if rows and "prompt" in rows[0] else "text")
    return _tabular.texts(rows, name, file)
