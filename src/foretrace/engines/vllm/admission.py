"""Admits requests: ASGI middleware for vLLM's server, and the check of each request's parameters.

vLLM checks a request on its event loop, where a build would block all clients. The middleware
therefore finds the steering arguments in the body before vLLM reads it, and waits until everything
is built. It passes the body on unchanged. When vLLM checks the parameters that it has read, they
must be those that were admitted. A goal that was not admitted is refused: it is never ignored.

Nothing is done for a request without a valid API key, if the server has keys.
"""

import asyncio
import hashlib
import json
import logging
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch

from foretrace.attribute import LogitAffine
from foretrace.attribute.automaton import UNREACHABLE, WeightedAutomaton
from foretrace.engines.vllm import metrics
from foretrace.engines.vllm.builder import require_small_goals, require_transformable
from foretrace.engines.vllm.builds import BuildQueue, BuildWorker, TooManyBuildsError
from foretrace.engines.vllm.params import ADMISSION, KEYS, Admission, names_goal, parse
from foretrace.engines.vllm.settings import Settings, open_builder
from foretrace.engines.vllm.table_store import GoalSize, Lease, TableStore
from foretrace.errors import ForetraceError, InvalidFileError, InvalidInputError
from foretrace.hmm import HMM
from foretrace.steering.goal import require_no_text, require_single_constraint

if TYPE_CHECKING:
    from vllm import SamplingParams

    from foretrace.engines.vllm.builder import TableBuilder

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

GENERATE = "/inference/v1/generate"  # has the fields of SamplingParams in its body
MAX_ARGS = 1 << 16  # bytes of `vllm_xargs`
MAX_BUILDS = 3  # for one request, whose attributes are replaced meanwhile, or its tables evicted
MAX_OCCURRENCES = 8  # of its name in a body that are looked at
# Seconds that HTTP 429 is delayed. A client that tries again at once cannot send more than one
# request per connection and second: answering hundreds per second would slow down all others.
REFUSAL_DELAY = 1.0
# The decoding process loads a table when its request enters the batch, and the step waits for it.
# Bytes per second of tables that it may not have loaded yet, and how many seconds' worth at once.
LOAD_RATE, LOAD_BURST = 128 << 20, 0.25

NOT_ADMITTED = (
    "This server steers only requests that have its API key, and a JSON body in UTF-8 whose "
    f"vllm_xargs have at most {MAX_ARGS:,} bytes."
)
DROPPED = (
    "vLLM does not pass vllm_xargs on here, so that the goal would be ignored: it does not in beam "
    "search, and on some routes. Leave vllm_xargs or use_beam_search out."
)


class _RefusedError(Exception):
    """A request that the middleware answers, and why."""

    def __init__(self, status: int, why: str, retry_after: int | None = None) -> None:
        super().__init__(why)
        self.status, self.why, self.retry_after = status, why, retry_after

    async def send(self, send: Send) -> None:
        """Answer the request."""
        metrics.REFUSED.inc()
        error = {"message": self.why, "type": "Refused", "param": None, "code": self.status}
        body = json.dumps({"error": error}).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        if self.retry_after is not None:
            headers.append((b"retry-after", str(self.retry_after).encode()))
        start = {"type": "http.response.start", "status": self.status, "headers": headers}
        await send(start)
        await send({"type": "http.response.body", "body": body})


class _Request:
    """What the middleware knows of a request that vLLM checks later."""

    def __init__(self) -> None:
        self.args: dict[str, Any] = {}
        self.admission: Admission | None = None
        self.sizes: list[GoalSize] = []
        self._leases: list[Lease] = []
        self.is_named = False
        """Whether its body has `vllm_xargs`, which the middleware has not read."""

    def lease(self, store: TableStore, admission: Admission) -> bool:
        """Lease the tables and markers of the request; return whether all of them exist."""
        leases = [store.lease(key) for key in admission.keys]
        self._leases = [lease for lease in leases if lease is not None]
        if len(self._leases) < len(leases):
            self.close()
        return len(self._leases) == len(leases)

    def close(self) -> None:
        """Release the leases, so that the tables can be evicted."""
        self.admission = None
        while self._leases:
            self._leases.pop().release()

    def admitted(self, extra_args: Mapping[str, Any] | None) -> Admission | None:
        """Return the admission of the parameters that vLLM has read; None if they have no goal."""
        if extra_args is not None and names_goal(extra_args):
            given = {key: extra_args[key] for key in KEYS if key in extra_args}
            if self.admission is None or given != self.args:
                raise InvalidInputError(NOT_ADMITTED)
            return self.admission
        if self.args or (self.is_named and not extra_args):
            raise InvalidInputError(DROPPED)
        return None

    def watch(self, receive: Receive) -> Receive:
        """Return a function that receives messages, and notes whether `vllm_xargs` is in one."""
        name, end = b'"vllm_xargs"', b""

        async def watching() -> Message:
            nonlocal end
            message = await receive()
            body = end + message.get("body", b"")
            self.is_named |= name in body
            end = body[-len(name) :]
            return message

        return watching


REQUEST: ContextVar[_Request | None] = ContextVar("foretrace_request", default=None)


class SteeringMiddleware:
    """Admits the requests of a server, and hands them on unchanged."""

    def __init__(self, app: App) -> None:
        settings = Settings.from_environment()
        self.app, self.max_body = app, settings.body_mb << 20
        self.builder = open_builder(torch.device("cpu"), metrics.observe_cache)
        self.builder.served = True
        self.builder.load_tokenizer()
        self.worker = BuildWorker()
        self.worker.start()
        self.queue = BuildQueue(self.worker.build)
        self.load_rate = LoadRate(settings.memory_mb << 20)
        self.keys: _Keys | None = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass a request to the application, after its goals are admitted."""
        if scope["type"] == "lifespan":
            await self._wait_for_worker()
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        self.keys = self.keys or _Keys(scope["app"])
        client = self.keys.client(scope)
        if client is None and self.keys.are_required(scope):
            await self.app(scope, receive, send)  # which answers that the key is wrong
            return
        request = _Request()
        REQUEST.set(request)
        if client is None or b"json" not in (_header(scope, b"content-type") or b"").lower():
            await self.app(scope, request.watch(receive), send)
            return
        try:
            messages = await self._read(scope, receive)
            args = _find_args(scope, messages)
            request.is_named = args is None
            await asyncio.sleep(0)  # others come first: vLLM reads the whole body next
            await self._admit(request, client, args or {})
            messages.reverse()

            async def replay() -> Message:
                return messages.pop() if messages else await receive()

            await self.app(scope, replay, send)
        except _RefusedError as refusal:
            await refusal.send(send)
        finally:
            request.close()

    async def _wait_for_worker(self) -> None:
        """Wait until the process can build: the first goal would wait for it otherwise."""
        try:
            await asyncio.get_running_loop().run_in_executor(None, self.worker.wait)
        except OSError as error:  # the first request with a new goal starts another process
            logger.error("%s", error)

    async def _read(self, scope: Message, receive: Receive) -> list[Message]:
        """Read the body, up to the limit."""
        header = _header(scope, b"content-length") or b""
        declared, size = int(header[:20]) if header.isdigit() else 0, 0
        messages: list[Message] = []
        while max(declared, size) <= self.max_body:
            message = await receive()
            messages.append(message)
            size += len(message.get("body", b""))
            if message["type"] != "http.request" or not message.get("more_body", False):
                return messages
        limit = self.max_body >> 20
        raise _RefusedError(413, f"The body of a request may have at most {limit} MB.")

    async def _admit(self, request: _Request, client: str, args: dict[str, Any]) -> None:
        """Lease the tables and markers of a request; build them first if they do not exist."""
        try:
            params = parse(args)
            if params is None:
                return
            request.args = {key: args[key] for key in KEYS if key in args}
            for _ in range(MAX_BUILDS):
                admission = self.builder.admit(params)
                if request.lease(self.builder.store, admission):
                    break
                await self.queue.build(client, admission.keys, request.args)
            else:
                raise OSError("The tables were removed before they could be used.")
            request.sizes = [self.builder.store.size(key) for key in admission.tables]
            await self.load_rate.wait(admission.tables, request.sizes)
            request.admission = replace(admission, leased=True)
        except TooManyBuildsError as error:
            await asyncio.sleep(REFUSAL_DELAY)
            raise _RefusedError(429, str(error), error.retry_after) from error
        except (OSError, InvalidFileError) as error:  # of the disk cache
            logger.error("Tables could not be built: %s", error)
            raise _RefusedError(503, "The server cannot build tables now. Try later.", 5) from error
        except ForetraceError as error:
            raise _RefusedError(400, str(error)) from error


class _Keys:
    """The API keys of a server, as vLLM has them from --api-key or VLLM_API_KEY."""

    def __init__(self, app: Any) -> None:
        """Take the keys from the middleware of vLLM's application."""
        from vllm.entrypoints.serve.middleware.authenticate import (
            GUARDED_PREFIX,
            AuthenticationMiddleware,
        )

        found = [entry for entry in app.user_middleware if entry.cls is AuthenticationMiddleware]
        self._checks = [entry.cls(app, *entry.args, **entry.kwargs) for entry in found]
        self._guarded: tuple[str, ...] = GUARDED_PREFIX

    def are_required(self, scope: Message) -> bool:
        """Return whether vLLM answers the request only with a key."""
        path: str = scope["path"].removeprefix(scope.get("root_path", ""))
        return path.startswith(self._guarded)

    def client(self, scope: Message) -> str | None:
        """Return the identity of a request's client; None if the key is missing or wrong.

        A client is its API key. On a server without keys, it is its address.
        """
        if not self._checks:
            return str((scope.get("client") or ["unknown"])[0])
        from starlette.datastructures import Headers

        headers = Headers(scope=scope)
        if not all(check.verify_token(headers) for check in self._checks):
            return None
        key = headers["Authorization"].partition(" ")[2]
        return hashlib.sha256(key.encode()).hexdigest()


class LoadRate:
    """Spreads the loading of tables over decoding steps."""

    def __init__(self, memory: int) -> None:
        """Create it for a decoding process that keeps tables of so many bytes."""
        self._memory, self._used = memory, 0
        self._recent: OrderedDict[str, int] = OrderedDict()
        self._loaded = 0.0
        """The time at which all tables are loaded."""

    async def wait(self, keys: Sequence[str], sizes: Sequence[GoalSize]) -> None:
        """Wait until tables of these sizes may be loaded."""
        pairs = zip(keys, sizes, strict=True)
        new = [size.nbytes for key, size in pairs if not self._use(key, size.nbytes)]
        now = monotonic()
        self._loaded = max(self._loaded, now - LOAD_BURST) + sum(new) / LOAD_RATE
        if new and self._loaded > now:
            await asyncio.sleep(self._loaded - now)

    def _use(self, key: str, size: int) -> bool:
        """Mark a table as used; return whether the decoding process probably has it."""
        known = key in self._recent
        self._used += size - self._recent.pop(key, 0)
        self._recent[key] = size
        while self._used > self._memory and len(self._recent) > 1:
            self._used -= self._recent.popitem(last=False)[1]
        return known


def _find_args(scope: Message, messages: list[Message]) -> dict[str, Any] | None:
    """Return the steering arguments of a body, without reading the rest; None if they are too long.

    In JSON, the name of a key in quotes and a colon can only be that key.
    """
    path: str = scope["path"]
    name = b'"extra_args"' if path.endswith(GENERATE) else b'"vllm_xargs"'
    body, end = b"".join(message.get("body", b"") for message in messages), None
    for _ in range(MAX_OCCURRENCES):
        end = body.rfind(name, 0, end)
        if end < 0:
            break
        if colon := re.compile(rb"\s*:\s*").match(body, end + len(name)):
            return _read_object(body[colon.end() : colon.end() + MAX_ARGS + 1])
    return {}


def _read_object(text: bytes) -> dict[str, Any] | None:
    """Read the JSON object at the beginning of a text; None if it is too long."""
    try:
        value, _ = json.JSONDecoder().raw_decode(text.decode("utf-8", "ignore"))
    except (ValueError, RecursionError):
        return None if len(text) > MAX_ARGS else {}
    return value if isinstance(value, dict) else {}  # vLLM itself refuses other values


def _header(scope: Message, name: bytes) -> bytes | None:
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    return next((value for key, value in headers if key == name), None)


def validate_params(params: "SamplingParams") -> None:
    """Check a request, build what it needs if no server does, and record it in its arguments.

    Runs in the process that takes requests.

    Raises:
        ForetraceError: The request cannot be steered.
    """
    _remove_added(params)
    request = REQUEST.get()
    if request is None and not names_goal(params.extra_args):
        return
    try:
        builder = open_builder(torch.device("cpu"), metrics.observe_cache)
        admission = _admission(builder, request, params)
        if admission is None:
            return
        sizes = [] if request is None else request.sizes
        sizes = sizes or [builder.store.size(key) for key in admission.tables]
        check_limits(admission, sizes, params.max_tokens)
        if any(size.min_tokens is not None for size in sizes):
            _check_constraint(builder, admission, params)
    except ForetraceError:
        metrics.REFUSED.inc()
        raise
    stops = [] if params.ignore_eos else _add_stops(params, builder.hmm.config.eos_token_ids)
    admission = replace(admission, stops=stops)
    params.extra_args = {**params.extra_args, ADMISSION: admission.to_plain()}


def _admission(
    builder: "TableBuilder", request: _Request | None, params: "SamplingParams"
) -> Admission | None:
    """Return the admission of a request; None if it is not steered."""
    if request is not None:
        return request.admitted(params.extra_args)
    if builder.served:
        raise InvalidInputError(NOT_ADMITTED)
    steering_params = parse(params.extra_args)
    return None if steering_params is None else builder.build(steering_params)


def _add_stops(params: "SamplingParams", ends: tuple[int, ...]) -> list[int]:
    """Add the HMM's end-of-text tokens to the stop tokens; return those that were added."""
    stops = params.stop_token_ids or []
    added = [end for end in ends if end not in stops]
    params.stop_token_ids = [*stops, *added]
    params.all_stop_token_ids.update(added)
    return added


def _remove_added(params: "SamplingParams") -> None:
    """Undo an earlier check: a caller may send the same object again with other arguments."""
    if not params.extra_args or ADMISSION not in params.extra_args:
        return
    params.extra_args = dict(params.extra_args)
    admission = params.extra_args.pop(ADMISSION)
    stops = admission.get("stops") if isinstance(admission, dict) else None
    if isinstance(stops, list):
        params.stop_token_ids = [stop for stop in params.stop_token_ids or [] if stop not in stops]
        params.all_stop_token_ids.difference_update(stops)


def check_limits(admission: Admission, sizes: Sequence[GoalSize], limit: int | None) -> None:
    """Raise if goals have too many terms, too few tokens to be met, or transforms of evidence.

    Args:
        admission: The goals of a request.
        sizes: The size of each goal.
        limit: The maximum number of tokens of the text.
    """
    require_small_goals(sum(size.terms for size in sizes), sum(size.rank for size in sizes))
    for transform, size in zip(admission.transforms, sizes, strict=True):
        require_transformable(LogitAffine(*transform), size.has_evidence)
    required = [size.min_tokens for size in sizes if size.min_tokens is not None]
    require_single_constraint(len(required))
    if isinstance(admission.window, str):
        require_no_text(any(size.requires_text for size in sizes))
    _require_room(required, _num_tokens(admission, limit))


def _num_tokens(admission: Admission, limit: int | None) -> int | None:
    """Return how many tokens the goals are about at most."""
    limits = [one for one in (limit, admission.window) if isinstance(one, int)]
    return min(limits, default=None)


def _require_room(required: Sequence[int], limit: int | None) -> None:
    if limit is not None and required and required[0] > limit:
        raise InvalidInputError(
            f"The required texts take {required[0]} tokens at least, but the text may have "
            f"{limit}. Raise max_tokens, or the window."
        )


def _check_constraint(
    builder: "TableBuilder", admission: Admission, params: "SamplingParams"
) -> None:
    """Raise if other parameters of a request leave no text that meets its constraint."""
    if params.structured_outputs is not None:
        raise InvalidInputError(
            "A request with structured outputs cannot also have required or forbidden texts: "
            "the grammar may leave no token that satisfies both. Put the texts into the schema, or "
            "leave one of the two out."
        )
    for alternatives in admission.required:
        _require_free("bad_words", params.bad_words or [], alternatives)
        if not params.min_tokens:  # stop strings do not count in the first `min_tokens` tokens
            whole = 0 if params.include_stop_str_in_output else 1
            kept = [text[: len(text) - 1 + whole] for text in alternatives]
            _require_free("stop", params.stop or [], kept)
    if params.allowed_token_ids or params.stop_token_ids:
        for key in admission.tables:
            automaton = builder.store.attribute(key).terms.automaton
            if automaton is not None:
                limit = _num_tokens(admission, params.max_tokens)
                _require_spellable(automaton, builder.hmm, params, limit)


def _require_free(name: str, texts: Sequence[str], alternatives: Sequence[str]) -> None:
    """Raise if each of the alternatives has one of the texts in it."""
    if all(any(one in text for one in texts) for text in alternatives):
        raise InvalidInputError(
            f"{name} has a text that is part of required text. Leave one of the two out."
        )


def _require_spellable(
    automaton: WeightedAutomaton, hmm: HMM, params: "SamplingParams", limit: int | None
) -> None:
    """Raise if no text of the tokens that a request may use meets its constraint."""
    stops = {*params.all_stop_token_ids, *hmm.config.eos_token_ids}
    allowed = set(params.allowed_token_ids or range(hmm.vocab_size))
    usable = [token for token in allowed - stops if token < hmm.vocab_size]
    tokens = torch.tensor(usable, dtype=torch.long)
    moves = automaton.dfa.transitions.long()[:, torch.unique(automaton.dfa.class_of(tokens).long())]
    num_states = automaton.dfa.num_states
    accepting = (automaton.final_weights > 0).any(0)
    distance = torch.where(accepting, 0.0, torch.inf)  # tokens to a text that meets the constraint
    lasting = torch.ones_like(accepting)  # whether as many tokens can follow as were tried
    for _ in range(num_states):
        distance = torch.cat([distance[:, None], distance[moves] + 1], 1).min(1).values
    for _ in range(num_states if limit is None else min(limit, num_states)):
        lasting = ((distance < torch.inf) & lasting)[moves].any(1)
    longest = UNREACHABLE - 1 if limit is None else limit
    if distance[0] > longest or not (allowed & stops or lasting[0]):
        raise InvalidInputError(
            "No text of the tokens that allowed_token_ids and stop_token_ids leave has all "
            "required and no forbidden texts within max_tokens. Allow more tokens."
        )
