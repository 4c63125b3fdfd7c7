"""Google's Perspective API as a judge. It closes at the end of 2026.

Its own rules hold: a key, and as many requests a second as the key allows.
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
BUSY = {429, 500, 502, 503, 504}  # answers that are worth another attempt
REFUSED = {401, 403}


def perspective_judge(attribute: str = "TOXICITY", requests_per_second: float = 1.0) -> Judge:
    """Make a judge of Perspective; the key is in the environment, as PERSPECTIVE_API_KEY."""
    key = os.environ.get(KEY)
    if not key:
        raise InvalidInputError(f"Perspective needs a key: set {KEY} to yours.")
    client = PerspectiveClient(f"{ADDRESS}?key={key}", attribute, 1 / requests_per_second)
    return Judge(f"perspective:{attribute}", client.score)


@dataclass
class PerspectiveClient:
    """Asks about one text after another, not faster than allowed, and again when refused."""

    address: str
    attribute: str
    pause: float
    """Seconds between requests."""
    attempts: int = 6
    timeout: float = 30.0
    sleep: Callable[[float], None] = time.sleep
    _next: float = field(default=0.0, init=False)

    def score(self, texts: Sequence[str]) -> list[Score]:
        """Score texts; None where there is no answer, as for languages that it does not know."""
        return [self._ask(text) for text in texts]

    def _ask(self, text: str) -> Score:
        body = {
            "comment": {"text": text},
            "requestedAttributes": {self.attribute: {}},
            "languages": ["en"],
            "doNotStore": True,
        }
        for attempt in range(self.attempts):
            self._wait()
            try:
                answer = self._post(body)
                return float(answer["attributeScores"][self.attribute]["summaryScore"]["value"])
            except HTTPError as error:
                if error.code in REFUSED:
                    raise JudgeRefusedError(
                        f"Perspective refuses the key ({error.code} {error.reason}). Check {KEY}, "
                        f"and that the API is enabled for it."
                    ) from error
                if error.code not in BUSY:
                    return None
            except (OSError, HTTPException):  # nobody there, or gone in the middle
                pass
            except (KeyError, TypeError, ValueError):  # an answer without a score
                return None
            self.sleep(self.pause * 2**attempt)
        return None

    def _wait(self) -> None:
        now = time.monotonic()
        if now < self._next:
            self.sleep(self._next - now)
        self._next = max(now, self._next) + self.pause

    def _post(self, body: dict[str, Any]) -> Any:
        request = Request(
            self.address, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urlopen(request, timeout=self.timeout) as answer:
            return json.load(answer)
