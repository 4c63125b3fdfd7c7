"""A client of servers with OpenAI's interface of chats."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from time import sleep
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from foretrace._http import post_json
from foretrace.chat import Messages
from foretrace.errors import InvalidInputError, ServerError, ServerUnavailableError

KEY = "OPENAI_API_KEY"
REQUESTS = 4  # at once
MAX_FAILED = 8  # requests without one that is answered


class Answer(NamedTuple):
    """The answer to a chat.

    Attributes:
        text: The text.
        finished: Whether the text ends by itself, and not at the limit of its length.
        first_token: The log-probabilities of the likeliest first tokens, if the server gives them.
    """

    text: str
    finished: bool
    first_token: dict[str, float]


@dataclass(frozen=True)
class ChatServer:
    """A language model on a server with OpenAI's interface.

    The key is read from the environment variable `OPENAI_API_KEY`, if there is one.

    Attributes:
        url: The address, such as `http://localhost:8000/v1`.
        model: The name of the model on the server.
        timeout: The seconds after which a request fails.
        attempts: The number of attempts for one request.
        sleep: The function that waits between attempts.

    Example:
        >>> from foretrace.chat_server import ChatServer
        >>> ChatServer("http://localhost:8000/v1/", "my-lm").address
        'http://localhost:8000/v1/chat/completions'
    """

    url: str
    model: str
    timeout: float = 60.0
    attempts: int = 5
    sleep: Callable[[float], None] = field(default=sleep, repr=False)

    def __post_init__(self) -> None:
        if urlsplit(self.url).scheme not in ("http", "https") or not urlsplit(self.url).netloc:
            raise InvalidInputError(
                f"'{self.url}' is no address of a server. Write it as http://localhost:8000/v1."
            )

    @property
    def address(self) -> str:
        """The address of requests."""
        return f"{self.url.rstrip('/').removesuffix('/chat/completions')}/chat/completions"

    def answer(self, messages: Messages, **options: Any) -> Answer:
        """Return the answer to a chat.

        Args:
            messages: The chat.
            **options: Fields of the request, such as `max_tokens`.

        Returns:
            The answer.

        Raises:
            ServerError: If the server gives no valid answer.
            ServerUnavailableError: If it cannot be reached, or refuses every request.
        """
        key = os.environ.get(KEY)
        response = post_json(
            self.address,
            {"model": self.model, "messages": [dict(message) for message in messages], **options},
            {"Authorization": f"Bearer {key}"} if key else {},
            timeout=self.timeout,
            attempts=self.attempts,
            sleep=self.sleep,
        )
        try:
            choice = response["choices"][0]
            text = str(choice["message"]["content"] or "")
        except (KeyError, TypeError, IndexError) as error:
            raise ServerError(f"{self.address} answered without a message") from error
        return Answer(text, choice.get("finish_reason") == "stop", _first_token(choice))

    def answer_all(
        self, chats: Sequence[Messages], *, seed: int | None = None, **options: Any
    ) -> list[Answer | None]:
        """Return the answers to chats, a few at once; None where a request failed.

        Args:
            chats: The chats.
            seed: The seed of the first request; every further one adds 1. None: no seed is sent.
            **options: Fields of all requests.

        Returns:
            An answer or None for each chat.

        Raises:
            ServerUnavailableError: If the server answers nothing.
        """

        def attempt(numbered: tuple[int, Messages]) -> Answer | ServerError:
            number, chat = numbered
            seeded = {} if seed is None else {"seed": seed + number}
            try:
                return self.answer(chat, **seeded, **options)
            except ServerUnavailableError:
                raise
            except ServerError as error:
                return error

        with ThreadPoolExecutor(REQUESTS) as threads:
            answers = list(threads.map(attempt, enumerate(chats)))
        failures = [answer for answer in answers if isinstance(answer, ServerError)]
        if len(failures) == len(answers) >= MAX_FAILED:
            raise ServerUnavailableError(f"No request was answered. The last: {failures[-1]}")
        return [None if isinstance(answer, ServerError) else answer for answer in answers]


def _first_token(choice: dict[str, Any]) -> dict[str, float]:
    """Return the log-probabilities of the first token's candidates; none if they are not given."""
    try:
        candidates = choice["logprobs"]["content"][0]["top_logprobs"]
        return {str(entry["token"]): float(entry["logprob"]) for entry in candidates}
    except (KeyError, TypeError, IndexError, ValueError):
        return {}
