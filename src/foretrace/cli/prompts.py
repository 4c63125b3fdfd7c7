"""Read prompts from a file."""

from pathlib import Path


def read_prompts(file: Path, column: str | None = None) -> list[str]:
    """Read prompts from a column of a file; by default `prompt` if it exists, else `text`."""
    from foretrace import _tabular

    rows = _tabular.read_rows(file, [column] if column else [])
    name = column or ("prompt" if rows and "prompt" in rows[0] else "text")
    return _tabular.texts(rows, name, file)
