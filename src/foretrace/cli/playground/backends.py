"""What generates the texts of the playground: a language model here, or a running server."""

import json
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from pathlib import Path
from threading import Condition
from typing import TYPE_CHECKING, Any, Protocol

from foretrace.chat import Prompt, as_messages
from foretrace.cli.explain import TokenTable, explain_tokens
from foretrace.cli.goal_options import (
    BuildProbe,
    GoalSettings,
    LoadedGoals,
    load_goals,
    parse_transform,
)
from foretrace.cli.text_generator import Generation, TextGenerator
from foretrace.errors import ForetraceError, InvalidInputError, reason

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from foretrace.hmm import HMM

CANDIDATES = 5  # per position
TIMEOUT = 120.0  # seconds without a byte from the server
MAX_LISTED_GOALS = 1_000  # entries of the page's drop-down list


@dataclass(frozen=True)
class PlaygroundRequest:
    """The values of the page's form."""

    prompt: Prompt
    """A text to continue, or the messages of a chat."""
    goal: str
    level: str = "medium"
    strength: float | None = None
    """Instead of a level."""
    transform: str = ""
    """The paper's transform, SCALE,SHIFT, instead of a level; empty if there is none."""
    horizon: int = 64
    neutral_end: bool = True
    max_new_tokens: int = 60
    top_p: float = 0.9
    seed: int = 0

    def settings(self) -> GoalSettings:
        """Return how strongly to steer."""
        transforms = [parse_transform(self.transform)] if self.transform else None
        return GoalSettings([self.strength], self.level, transforms, self.neutral_end)

    def params(self) -> dict[str, Any]:
        """Return the steering parameters of a request to a server.

        The default horizon is left out, because it is an error if the server has a shorter one.
        """
        params: dict[str, Any] = {"goal": self.goal}
        if self.transform:
            transform = parse_transform(self.transform)
            params["transform"] = [transform.scale, transform.shift]
        elif self.strength is not None:
            params["strength"] = self.strength
        else:
            params["level"] = self.level
        if self.horizon != PlaygroundRequest.horizon:
            params["horizon"] = self.horizon
        return {**params, "neutral_end": self.neutral_end}


@dataclass(frozen=True)
class PlaygroundResult:
    """A generated text, which may be incomplete; if the backend explains it, with its tokens."""

    text: str
    table: TokenTable | None = None
    generation: Generation | None = None
    """The complete text, with its price and the probability of the goal's attribute."""


OnText = Callable[[str], None]


class Backend(Protocol):
    """Generates texts for the page."""

    def goals(self) -> list[str]:
        """List the goals to choose from."""

    def can_chat(self) -> bool:
        """Return whether the language model has a chat template."""

    def generate(
        self, request: PlaygroundRequest, steered: bool, on_text: OnText
    ) -> PlaygroundResult:
        """Generate a text; call `on_text` with the text generated so far."""

    def explain(self, request: PlaygroundRequest, result: PlaygroundResult) -> PlaygroundResult:
        """Add the tokens of a complete text, if the backend can explain them."""


class Turns:
    """Lets threads generate texts in turn, token by token, each with its own random numbers.

    `generate` of transformers draws from torch's global random number generators.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._waiting: deque[object] = deque()  # the first one generates

    def __enter__(self) -> None:
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            self._changed.wait_for(lambda: self._waiting[0] is ticket)

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._waiting.popleft()
            self._changed.notify_all()

    def pass_on(self) -> None:
        """Let the other threads generate until it is this thread's turn again."""
        import torch

        state, on_gpus = torch.get_rng_state(), torch.cuda.get_rng_state_all()
        self.__exit__()
        self.__enter__()
        torch.set_rng_state(state)
        torch.cuda.set_rng_state_all(on_gpus)


def list_goals(folder: Path) -> list[str]:
    """List the attributes of a folder as expressions, up to the limit of the page's list."""
    from foretrace.attribute import AttributeStore, as_expression

    return [as_expression(name) for name in sorted(AttributeStore(folder))[:MAX_LISTED_GOALS]]


@dataclass
class LocalBackend:
    """A language model in this process, its HMM and a folder of attributes."""

    lm: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    hmm: "HMM"
    attributes: Path
    build_probe: BuildProbe
    # The unsteered and the steered text of a request share its goals, and so do turns of a chat.
    _last_goals: tuple[PlaygroundRequest, LoadedGoals] | None = None
    _turns: Turns = field(default_factory=Turns)

    def goals(self) -> list[str]:
        """List the attributes of the folder."""
        return list_goals(self.attributes)

    def can_chat(self) -> bool:
        """Return whether the tokenizer has a chat template."""
        return bool(self.tokenizer.chat_template)

    def generate(
        self, request: PlaygroundRequest, steered: bool, on_text: OnText
    ) -> PlaygroundResult:
        """Generate a text, in turn with other threads."""

        def report(text: str) -> None:
            on_text(text)
            self._turns.pass_on()

        with self._turns:
            goals = self._load_goals(request)
            options = {"max_new_tokens": request.max_new_tokens, "top_p": request.top_p}
            generator = TextGenerator(self.lm, self.tokenizer, goals, options)
            (generation,) = generator.generate(
                [request.prompt], request.seed, steered=steered, on_text=report
            )
        return PlaygroundResult(generation.text, generation=generation)

    def explain(self, request: PlaygroundRequest, result: PlaygroundResult) -> PlaygroundResult:
        """Explain each token by the goal, also in an unsteered text."""
        assert result.generation is not None
        with self._turns:
            table = explain_tokens(
                self.lm,
                self.tokenizer,
                result.generation.prompt_ids,
                result.generation.token_ids,
                self._load_goals(request),
                max_new_tokens=request.max_new_tokens,
                candidates=CANDIDATES,
            )
        return replace(result, table=table)

    def _load_goals(self, request: PlaygroundRequest) -> LoadedGoals:
        request = replace(request, prompt="", seed=0)
        if self._last_goals is None or self._last_goals[0] != request:
            goals = load_goals(
                self.hmm,
                self.tokenizer,
                self.attributes,
                [request.goal],
                request.settings(),
                request.horizon,
                build_probe=self.build_probe,
            )
            self._last_goals = request, goals
        return self._last_goals[1]


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

    def explain(self, request: PlaygroundRequest, result: PlaygroundResult) -> PlaygroundResult:
        """Return the text as it is: the server returns no probabilities."""
        return result

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
            body["vllm_xargs"] = request.params()
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


def _read_error(content: bytes) -> str:
    """Return the error message of a response, or an empty string if it has none."""
    try:
        return _error_message(json.loads(content))
    except (ValueError, KeyError, TypeError):
        return ""


def _error_message(event: dict[str, Any]) -> str:
    message: str = event["error"]["message"]
    return message
