"""Tables are built before a request is admitted, in a thread of their own: nobody waits for them.

An ASGI middleware for vLLM's server. vLLM checks a request's arguments on the thread that answers
all others; a table that is built there holds them up. Here it is built beforehand.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import torch

from foretrace.engines import counters
from foretrace.engines.asked import read_asked
from foretrace.engines.settings import open_library
from foretrace.errors import ForetraceError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class Admission:
    """Prepares what a request asks for, and hands it on as it came."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.library = open_library(torch.device("cpu"), counters.observe_library)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Look at what may be a request for a text; let everything else pass."""
        wanted = scope["type"] == "http" and scope["method"] == "POST"
        if not wanted or not scope["path"].startswith("/v1/"):
            await self.app(scope, receive, send)
            return
        messages, body, more = [], b"", True
        while more:
            message = await receive()
            messages.append(message)
            body += message.get("body", b"")
            more = message["type"] == "http.request" and message.get("more_body", False)
        if b"vllm_xargs" in body:
            await self._prepare(body)
        read = iter(messages)

        async def again() -> Message:
            """Give what was read, and then what is new: that the client has gone, for one."""
            return next(read, None) or await receive()

        await self.app(scope, again, send)

    async def _prepare(self, body: bytes) -> None:
        """Build tables. What is wrong is not said here: vLLM's own check will say it."""
        try:
            given = json.loads(body).get("vllm_xargs")
            asked = read_asked(given) if isinstance(given, dict) else None
            if asked is not None:
                await asyncio.to_thread(self.library.admit, asked)
        except (ForetraceError, ValueError, AttributeError, OSError, RecursionError):
            return
