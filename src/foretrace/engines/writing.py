"""Texts that a language model writes, batch by batch, kept in a file."""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from foretrace import _io
from foretrace.chat import Prompt, is_chat
from foretrace.chat_server import ChatServer
from foretrace.errors import InvalidFileError, InvalidInputError

BATCH = 160  # prompts
MAX_NEW_TOKENS = 40
TOP_P = 0.9
OnProgress = Callable[[int, int], None]


class Written(NamedTuple):
    """A text that a language model has written.

    Attributes:
        text: The text, without its prompt. Empty if the writer failed.
        finished: Whether the text ends by itself, and not at the limit of its length.
    """

    text: str
    finished: bool


class Writer(Protocol):
    """A language model that writes texts.

    Attributes:
        name: The model and how it samples. Texts of writers of different names are not mixed.
    """

    @property
    def name(self) -> str:
        """The model and how it samples."""

    def write(
        self, prompts: Sequence[Prompt], opposites: Sequence[Prompt] | None, seed: int
    ) -> Sequence[Written]:
        """Continue texts and answer chats: one text for each. Equal prompts are neighbours.

        A writer may use `opposites`, for each prompt one that its text should not fit.
        """


@dataclass(frozen=True)
class ServerWriter:
    """Writes answers to chats by a language model on a server.

    Attributes:
        server: The server.
    """

    server: ChatServer

    @property
    def name(self) -> str:
        """The model and how it samples."""
        return f"{self.server.model} at {self.server.address}"

    def write(
        self, prompts: Sequence[Prompt], opposites: Sequence[Prompt] | None, seed: int
    ) -> list[Written]:
        """Answer chats, whatever their opposites; an answer is empty where a request failed.

        Raises:
            ServerUnavailableError: If the server cannot be reached, or refuses every request.
        """
        chats = [prompt for prompt in prompts if is_chat(prompt)]
        if len(chats) < len(prompts):
            raise InvalidInputError("A server answers chats only. Pass messages, not texts.")
        answers = self.server.answer_all(chats, seed=seed, top_p=TOP_P, max_tokens=MAX_NEW_TOKENS)
        return [Written(*answer[:2]) if answer else Written("", False) for answer in answers]


def write_texts(
    writer: Writer,
    prompts: Sequence[Prompt],
    file: str | os.PathLike[str],
    *,
    opposites: Sequence[Prompt] | None = None,
    seed: int = 0,
    on_progress: OnProgress = lambda done, total: None,
) -> list[Written]:
    """Have texts written, except batches that the file already holds, with the same settings.

    A resumed run has the same result as an uninterrupted one. With more prompts after the same
    ones, only the new batches are written.

    Args:
        writer: The language model.
        prompts: Texts to continue and chats to answer. For several texts, repeat a prompt.
        file: The file of JSON lines that every batch is appended to.
        opposites: For each prompt, one that its text should not fit.
        seed: The random seed.
        on_progress: Called after each batch with the numbers of texts written and of all.

    Returns:
        A text for each prompt.

    Raises:
        InvalidFileError: If the file holds something else.

    Example:
        >>> from foretrace.engines.writing import Written, write_texts
        >>> class Echo:
        ...     name = "echo"
        ...     def write(self, prompts, opposites, seed):
        ...         return [Written(prompt, finished=True) for prompt in prompts]
        >>> write_texts(Echo(), ["hello"], folder / "written.jsonl")
        [Written(text='hello', finished=True)]
    """
    file = Path(file)
    known = _read(file)
    texts: list[Written] = []
    for start in range(0, len(prompts), BATCH):
        here = slice(start, start + BATCH)
        batch, other = prompts[here], None if opposites is None else opposites[here]
        settings = json.dumps([writer.name, seed, start, batch, other])
        key = hashlib.sha256(settings.encode()).hexdigest()
        if key not in known:
            batch_seed = int(np.random.SeedSequence([seed, start]).generate_state(1)[0])
            known[key] = list(writer.write(batch, other, batch_seed))
            rows = [written._asdict() for written in known[key]]
            _io.append_lines(file, [{"key": key, "texts": rows}])
        texts += known[key]
        on_progress(start + len(batch), len(prompts))
    return texts


def _read(file: Path) -> dict[str, list[Written]]:
    """Read the batches of a file, by the key of their settings."""
    try:
        return {
            row["key"]: [Written(**text) for text in row["texts"]] for row in _io.read_lines(file)
        }
    except (KeyError, TypeError) as error:
        raise InvalidFileError(
            f"{file} holds something else than batches of texts. Choose another output, or remove "
            f"the file."
        ) from error
