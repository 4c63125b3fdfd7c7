"""A running server as the playground's author, asked over HTTP."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

from foretrace.cli.playground.backend import Tell, Told, Wish, goals_in
from foretrace.errors import ForetraceError, InvalidInputError, reason

PATIENCE = 120.0  # seconds for a server to say something


@dataclass(frozen=True)
class ServerAuthor:
    """A running `foretrace serve`; it tells texts, and no reasons."""

    address: str
    attributes: Path
    """A folder with the names of what the server knows, if there is one here."""

    def goals(self) -> list[str]:
        """List the attributes of the folder: a server does not tell its own."""
        return goals_in(self.attributes)

    def write(self, wish: Wish, steered: bool, tell: Tell) -> Told:
        """Ask for a completion, and hear it as it comes."""
        try:
            return self._write(wish, steered, tell)
        except (ForetraceError, InterruptedError):
            raise
        except (OSError, HTTPException, ValueError, LookupError) as error:
            raise InvalidInputError(
                f"{self.address} does not answer as `foretrace serve` does ({reason(error)}). Is "
                f"it still there?"
            ) from error

    def _write(self, wish: Wish, steered: bool, tell: Tell) -> Told:
        body: dict[str, Any] = {
            "model": self._model(),
            "prompt": wish.prompt,
            "max_tokens": wish.max_new_tokens,
            "top_p": wish.top_p,
            "temperature": 1.0,
            "seed": wish.seed,
            "stream": True,
        }
        if steered:
            body["vllm_xargs"] = _asked(wish)
        text = ""
        for event in self._events(body):
            text += "".join(choice["text"] for choice in event["choices"])
            tell(text)
        return Told(text)

    def _model(self) -> str:
        with self._open("/v1/models") as answer:
            found: str = json.load(answer)["data"][0]["id"]
        return found

    def _events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Read what a server sends, piece by piece; a mistake may come as one of them."""
        with self._open("/v1/completions", json.dumps(body).encode()) as answer:
            for line in answer:
                said = line.decode().strip()
                if not said.startswith("data: ") or said == "data: [DONE]":
                    continue
                event: dict[str, Any] = json.loads(said.removeprefix("data: "))
                if "error" in event:
                    raise InvalidInputError(f"The server says: {_message(event)}")
                yield event

    def _open(self, path: str, body: bytes | None = None) -> Any:
        address = self.address.rstrip("/") + path
        request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
        try:
            return urllib.request.urlopen(request, timeout=PATIENCE)
        except urllib.error.HTTPError as error:
            with error:
                said = error.read()
            raise InvalidInputError(f"The server says: {_reason(said) or error}") from error
        except OSError as error:
            raise InvalidInputError(
                f"No server answers at {self.address} ({error}). Start one: foretrace serve."
            ) from error


def _asked(wish: Wish) -> dict[str, Any]:
    """Give what foretrace reads of a request; a server looks as far ahead as it is told to."""
    asked: dict[str, Any] = {"goal": wish.goal, "strength": wish.strength, "shift": wish.shift}
    if wish.horizon != Wish.horizon:
        asked["horizon"] = wish.horizon
    return {**asked, "neutral_end": wish.neutral_end}


def _reason(said: bytes) -> str:
    """Find what a server says is wrong; nothing if it does not say so as it should."""
    try:
        return _message(json.loads(said))
    except (ValueError, KeyError, TypeError):
        return ""


def _message(event: dict[str, Any]) -> str:
    found: str = event["error"]["message"]
    return found
