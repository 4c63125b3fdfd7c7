"""A backend that sends requests to a running `foretrace serve`."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

from foretrace.chat import as_messages
from foretrace.cli.goal_options import parse_transform
from foretrace.cli.playground.backend import (
    OnText,
    PlaygroundRequest,
    PlaygroundResult,
    list_goals,
)
from foretrace.errors import ForetraceError, InvalidInputError, reason

TIMEOUT = 120.0  # seconds without a byte from the server


@dataclass(frozen=True)
class ServerBackend:
    """A running `foretrace serve`; it returns texts without explanations."""

    url: str
    attributes: Path
    """A local folder with the server's attributes: the server does not list them."""

    def goals(self) -> list[str]:
        """List the attributes of the local folder."""
        return list_goals(self.attributes)

    def can_chat(self) -> bool:
        """Return whether the server renders a chat."""
        chat = {"messages": as_messages("hello"), "add_special_tokens": False}
        try:
            with self._open("/tokenize", json.dumps(chat).encode()):
                return True
        except InvalidInputError:  # no template, or no server: the page says so when it is used
            return False

    def generate(
        self, request: PlaygroundRequest, steered: bool, on_text: OnText
    ) -> PlaygroundResult:
        """Request a completion, and stream it."""
        try:
            return self._generate(request, steered, on_text)
        except (ForetraceError, InterruptedError):
            raise
        except (OSError, HTTPException, ValueError, LookupError) as error:
            raise InvalidInputError(
                f"The response of {self.url} is not one of `foretrace serve` ({reason(error)}). "
                f"Check that the server still runs."
            ) from error

    def _generate(
        self, request: PlaygroundRequest, steered: bool, on_text: OnText
    ) -> PlaygroundResult:
        body: dict[str, Any] = {
            "model": self._served_model(),
            "max_tokens": request.max_new_tokens,
            "top_p": request.top_p,
            "temperature": 1.0,
            "seed": request.seed,
            "stream": True,
        }
        if steered:
            body["vllm_xargs"] = _steering_params(request)
        path = "/v1/completions"
        if isinstance(request.prompt, str):
            body["prompt"] = request.prompt
        else:
            path, body["messages"] = "/v1/chat/completions", list(request.prompt)
        text = ""
        for event in self._events(path, body):
            text += "".join(map(_new_text, event["choices"]))
            on_text(text)
        return PlaygroundResult(text)

    def _served_model(self) -> str:
        with self._open("/v1/models") as response:
            name: str = json.load(response)["data"][0]["id"]
        return name

    def _events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the server-sent events of a completion; raise if one of them is an error."""
        with self._open(path, json.dumps(body).encode()) as response:
            for encoded_line in response:
                line = encoded_line.decode().strip()
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event: dict[str, Any] = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise InvalidInputError(f"The server says: {_error_message(event)}")
                yield event

    def _open(self, path: str, body: bytes | None = None) -> Any:
        url = self.url.rstrip("/") + path
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        try:
            return urllib.request.urlopen(request, timeout=TIMEOUT)
        except urllib.error.HTTPError as error:
            with error:
                content = error.read()
            raise InvalidInputError(f"The server says: {_read_error(content) or error}") from error
        except OSError as error:
            raise InvalidInputError(
                f"No server answers at {self.url} ({error}). Start one: foretrace serve."
            ) from error


def _new_text(choice: dict[str, Any]) -> str:
    """Return the text that an event adds: of a completion, or of an answer in a chat."""
    text: str = choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
    return text


def _steering_params(request: PlaygroundRequest) -> dict[str, Any]:
    """Return the request's steering parameters.

    The default horizon is left out, because it is an error if the server has a shorter one.
    """
    params: dict[str, Any] = {"goal": request.goal}
    if request.transform:
        transform = parse_transform(request.transform)
        params["transform"] = [transform.scale, transform.shift]
    elif request.strength is not None:
        params["strength"] = request.strength
    else:
        params["level"] = request.level
    if request.horizon != PlaygroundRequest.horizon:
        params["horizon"] = request.horizon
    return {**params, "neutral_end": request.neutral_end}


def _read_error(content: bytes) -> str:
    """Return the error message of a response, or an empty string if it has none."""
    try:
        return _error_message(json.loads(content))
    except (ValueError, KeyError, TypeError):
        return ""


def _error_message(event: dict[str, Any]) -> str:
    message: str = event["error"]["message"]
    return message
