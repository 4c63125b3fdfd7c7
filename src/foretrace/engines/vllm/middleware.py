"""ASGI middleware for vLLM's server: builds the tables of a request before vLLM checks it.

vLLM validates a request on its event loop, where a build would block all clients. vLLM calls this
middleware before it checks the API key. The middleware therefore waits until the application reads
the request's body, which happens after the check of the key.
"""

import asyncio
import hashlib
import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import torch

from foretrace.engines.vllm import prometheus
from foretrace.engines.vllm.build_queue import BuildQueue, TooManyBuildsError
from foretrace.engines.vllm.build_worker import BuildWorker
from foretrace.engines.vllm.disk_cache import Lease
from foretrace.engines.vllm.params import parse
from foretrace.engines.vllm.settings import Settings, open_table_cache
from foretrace.errors import ForetraceError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

# The key of a request's arguments, or an escape of a letter, by which JSON can hide it.
NAMES_GOAL = re.compile(rb"vllm_xargs|\\u00[5-7]")
GUARDED = "/v1/"  # the path of requests that vLLM checks the API key of
DISCONNECTED = {"type": "http.disconnect"}
# Seconds that HTTP 429 is delayed. A client that tries again at once cannot send more than one
# request per connection and second: answering hundreds per second would slow down all others.
REFUSAL_DELAY = 1.0


class SteeringMiddleware:
    """Builds the tables of requests, and hands the requests on unchanged."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.cache = open_table_cache(torch.device("cpu"), prometheus.observe_cache)
        self.cache.read_only = True  # vLLM's check of a request must not build
        self.cache.load_tokenizer()
        self.max_body = Settings.from_environment().body_mb << 20
        self.worker = BuildWorker()
        self.worker.start()
        self.queue = BuildQueue(self.worker.build)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass a request to the application, and build its tables when its body is read."""
        if scope["type"] == "http" and scope["method"] == "POST" and _is_json(scope):
            request = _Request(self, scope, receive, send)
            try:
                await self.app(scope, request.receive, request.send)
            finally:
                request.release()
        else:
            await self.app(scope, receive, send)


class _Request:
    """One request: its whole body, and leases on its tables until the answer is complete."""

    def __init__(
        self, middleware: SteeringMiddleware, scope: Message, receive: Receive, send: Send
    ) -> None:
        self.middleware, self.scope = middleware, scope
        self._receive, self._send = receive, send
        self._messages: list[Message] | None = None
        self._leases: list[Lease] = []
        self._refused = False

    def release(self) -> None:
        """Release the leases, so that the tables can be evicted."""
        for lease in self._leases:
            lease.release()

    async def receive(self) -> Message:
        """Return the next message of the body; the first call builds the tables."""
        if self._messages is None:
            self._messages = []
            try:
                self._messages = await self._read()
                body = b"".join(message.get("body", b"") for message in self._messages)
                if NAMES_GOAL.search(body):
                    await self._prepare(body)
            except _RefusedError as refusal:
                await self._refuse(refusal)
            self._messages.reverse()
        if self._refused:
            return DISCONNECTED
        return self._messages.pop() if self._messages else await self._receive()

    async def send(self, message: Message) -> None:
        """Pass the application's answer on, unless the request was refused here."""
        if not self._refused:
            await self._send(message)

    async def _read(self) -> list[Message]:
        """Read the body, up to the limit."""
        limit = self.middleware.max_body
        header = _header(self.scope, b"content-length") or b""
        declared, size = int(header) if header.isdigit() else 0, 0
        messages: list[Message] = []
        while max(declared, size) <= limit:
            message = await self._receive()
            messages.append(message)
            size += len(message.get("body", b""))
            if message["type"] != "http.request" or not message.get("more_body", False):
                return messages
        raise _RefusedError(413, f"The body of a request may have at most {limit >> 20} MB.")

    async def _prepare(self, body: bytes) -> None:
        """Lease the tables of the goals in the body; build them first if they do not exist."""
        try:
            params = json.loads(body).get("vllm_xargs")
            steering_params = parse(params) if isinstance(params, dict) else None
        except (ValueError, AttributeError, RecursionError):
            return  # vLLM's own validation reports the error
        if steering_params is None:
            return
        try:
            leases = await asyncio.to_thread(self.middleware.cache.lease, steering_params)
            if leases is None and self._path().startswith(GUARDED):
                keys = self.middleware.cache.keys(steering_params)
                await self.middleware.queue.build(_client(self.scope), keys, params)
                leases = await asyncio.to_thread(self.middleware.cache.lease, steering_params)
        except TooManyBuildsError as error:
            await asyncio.sleep(REFUSAL_DELAY)
            raise _RefusedError(429, str(error), error.retry_after) from error
        except ForetraceError as error:
            raise _RefusedError(400, str(error)) from error
        except OSError as error:
            raise _RefusedError(503, "The server cannot build tables now. Try later.", 5) from error
        self._leases = leases or []

    def _path(self) -> str:
        path: str = self.scope["path"]
        return path.removeprefix(self.scope.get("root_path", ""))

    async def _refuse(self, refusal: "_RefusedError") -> None:
        """Answer the request in the place of the application."""
        prometheus.REFUSED.inc()
        self._refused = True
        error = {"message": refusal.why, "type": "Refused", "param": None, "code": refusal.status}
        body = json.dumps({"error": error}).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        if refusal.retry_after is not None:
            headers.append((b"retry-after", str(refusal.retry_after).encode()))
        start = {"type": "http.response.start", "status": refusal.status, "headers": headers}
        await self._send(start)
        await self._send({"type": "http.response.body", "body": body})


class _RefusedError(Exception):
    """A request that is answered here, and why."""

    def __init__(self, status: int, why: str, retry_after: int | None = None) -> None:
        super().__init__(why)
        self.status, self.why, self.retry_after = status, why, retry_after


def _header(scope: Message, name: bytes) -> bytes | None:
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    return next((value for key, value in headers if key == name), None)


def _is_json(scope: Message) -> bool:
    return b"json" in (_header(scope, b"content-type") or b"").lower()


def _client(scope: Message) -> str:
    """Return the identity of a request's client: its API key, or else its address."""
    key = _header(scope, b"authorization")
    if key:
        return hashlib.sha256(key).hexdigest()
    return str((scope.get("client") or ["unknown"])[0])
