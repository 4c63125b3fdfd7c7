"""Read prompts and chats from a file."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foretrace.chat import Messages


def read_prompts(file: Path, column: str | None = None) -> list[str]:
    """Read prompts from a column of a file; by default `prompt` if it exists, else `text`."""
    from foretrace import _tabular

    rows = _tabular.read_rows(file, [column] if column else [])
    name = column or ("prompt" if rows and "prompt" in rows[0] else "text")
    return _tabular.texts(rows, name, file)


def read_chats(file: Path) -> "list[Messages]":
    """Read chats from a file: its column `messages` if it exists, else one user message per row."""
    from foretrace import _tabular
    from foretrace.chat import as_messages, is_chat
    from foretrace.errors import InvalidFileError

    rows = _tabular.read_rows(file)
    if not rows or "messages" not in rows[0]:
        return [as_messages(text) for text in read_prompts(file)]
    chats = _tabular.column(rows, "messages", file)
    for number, chat in enumerate(chats, 1):
        if not is_chat(chat):
            raise InvalidFileError(
                f"{file}: 'messages' of row {number} is not a list of messages. Write "
                f'[{{"role": "user", "content": "..."}}].'
            )
    return chats
