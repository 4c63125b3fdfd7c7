"""Google's Perspective API as a judge. The API closes at the end of 2026.

It needs a key and limits the number of requests per second.
"""

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from foretrace.errors import InvalidInputError
from foretrace.evaluate.judges import Judge, JudgeRefusedError, Score

ADDRESS = "https://commentanalyzer.googleapis.com/v1alpha1/comments:analyze"
KEY = "PERSPECTIVE_API_KEY"
RETRIED = {429, 500, 502, 503, 504}
REFUSED = {401, 403}


def perspective_judge(attribute: str = "TOXICITY", requests_per_second: float = 1.0) -> Judge:
    """Build a judge that queries the Perspective API.

    The key is read from the environment variable `PERSPECTIVE_API_KEY`.

    Args:
        attribute: An attribute of Perspective, such as `TOXICITY` or `INSULT`.
        requests_per_second: The number of requests per second that the key allows.

    Returns:
        The judge.

    Raises:
        InvalidInputError: If the environment variable is not set.
    """
    key = os.environ.get(KEY)
    if not key:
        raise InvalidInputError(f"Perspective needs a key: set {KEY} to yours.")
    client = PerspectiveClient(f"{ADDRESS}?key={key}", attribute, 1 / requests_per_second)
    return Judge(f"perspective:{attribute}", client.score)


@dataclass
class PerspectiveClient:
    """A client that sends one text at a time, limits its rate, and retries temporary failures.

    Attributes:
        address: The URL of the API, with the key.
        attribute: The attribute of Perspective whose score is requested.
        pause: The seconds between two requests.
        attempts: The number of attempts for one text.
        timeout: The seconds after which a request fails.
        sleep: The function that waits; tests replace it.

    Example:
        >>> from foretrace.evaluate.perspective import PerspectiveClient
        >>> client = PerspectiveClient("http://127.0.0.1:9/", "TOXICITY", 0.0, attempts=1)
        >>> client.score(["nobody answers"])
        [None]
    """

    address: str
    attribute: str
    pause: float
    attempts: int = 6
    timeout: float = 30.0
    sleep: Callable[[float], None] = time.sleep
    _next_request: float = field(default=0.0, init=False)

    def score(self, texts: Sequence[str]) -> list[Score]:
        """Request the scores of texts.

        Args:
            texts: The texts.

        Returns:
            A score in [0, 1] for each text; None where the API has no answer, for example for a
            language that it does not support.

        Raises:
            JudgeRefusedError: If the API refuses the key.
        """
        return [self._request_score(text) for text in texts]

    def _request_score(self, text: str) -> Score:
        body = {
            "comment": {"text": text},
            "requestedAttributes": {self.attribute: {}},
            "languages": ["en"],
            "doNotStore": True,
        }
        for attempt in range(self.attempts):
            self._limit_rate()
            try:
                response = self._post(body)
                return float(response["attributeScores"][self.attribute]["summaryScore"]["value"])
            except HTTPError as error:
                if error.code in REFUSED:
                    raise JudgeRefusedError(
                        f"Perspective refuses the key ({error.code} {error.reason}). Check {KEY}, "
                        f"and that the API is enabled for it."
                    ) from error
                if error.code not in RETRIED:
                    return None
            except (OSError, HTTPException):  # no connection, or it broke
                pass
            except (KeyError, TypeError, ValueError):  # a response without a score
                return None
            self.sleep(self.pause * 2**attempt)
        return None

    def _limit_rate(self) -> None:
        now = time.monotonic()
        if now < self._next_request:
            self.sleep(self._next_request - now)
        self._next_request = max(now, self._next_request) + self.pause

    def _post(self, body: dict[str, Any]) -> Any:
        request = Request(
            self.address, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urlopen(request, timeout=self.timeout) as response:
            return json.load(response)
