"""The queue of table builds, with limits per client.

Tables are built one at a time, and clients take turns. A token bucket limits a client to a share of
the builder's CPU time: above it, its builds wait. A request that would wait too long, or that finds
too many builds in the queue, is refused, with the number of seconds after which to try again.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import ceil
from time import monotonic
from typing import Any, NamedTuple

from foretrace.errors import InvalidInputError

MAX_WAITING_PER_CLIENT, MAX_WAITING = 512, 2_048
SHARE = 0.5  # of the builder's CPU time that one client may use
SAVED_SECONDS = 10.0  # of building that a client may use at once
MAX_WAIT = 5.0  # seconds that a build may be expected to wait for its client's share
MAX_QUEUED = 60.0  # seconds that a build may be in the queue: clients do not wait forever
MAX_CLIENTS = 4_096  # whose use is remembered


class BuildResult(NamedTuple):
    """The result of a build."""

    seconds: float
    """CPU time of the build: other processes of the machine do not count."""
    error: str | None = None
    """The reason of a refusal; None if the tables were built."""


Build = Callable[[dict[str, Any]], BuildResult]


class TooManyBuildsError(InvalidInputError):
    """A client, or all clients together, exceed the limits on builds."""

    def __init__(self, retry_after: float) -> None:
        self.retry_after = max(1, ceil(retry_after))
        super().__init__(
            f"Too many new goals are waiting for their tables. Try again in {self.retry_after} s. "
            f"Goals that were used before are not affected."
        )


class _Client:
    """A client: the length of its queue, and a token bucket of build seconds."""

    def __init__(self) -> None:
        self.waiting = 0
        self.turn = asyncio.Lock()
        self._seconds, self._at = SAVED_SECONDS, monotonic()
        self._last_build = 0.0

    def balance(self) -> float:
        now = monotonic()
        self._seconds = min(SAVED_SECONDS, self._seconds + SHARE * (now - self._at))
        self._at = now
        return self._seconds

    def charge(self, seconds: float) -> None:
        self._seconds, self._last_build = self.balance() - seconds, seconds

    def expected_wait(self) -> float:
        """Return the seconds until one more build is within the share, if all are like the last."""
        return max(0.0, self.waiting * self._last_build - self.balance()) / SHARE

    async def wait_for_share(self) -> None:
        """Wait until the client has build time left."""
        while (balance := self.balance()) <= 0:
            await asyncio.sleep(0.001 - balance / SHARE)


class BuildQueue:
    """Builds tables for requests, within the limits above."""

    def __init__(self, build: Build) -> None:
        """Queue calls of `build`, which blocks until a request's tables are built."""
        self._build, self._turn = build, asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "foretrace-build")
        self._clients: OrderedDict[str, _Client] = OrderedDict()
        self._running: dict[tuple[str, ...], asyncio.Task[None]] = {}

    async def build(self, client: str, keys: list[str], params: dict[str, Any]) -> None:
        """Wait until the tables of a request are built.

        Args:
            client: The identity of the client that sent the request.
            keys: The keys of the tables. Requests for the same tables share one build.
            params: The request's `vllm_xargs`.

        Raises:
            TooManyBuildsError: The client has to try again later.
            InvalidInputError: The request is refused.
            OSError: The builder failed.
        """
        key = tuple(keys)
        if key not in self._running:
            account = self._account(client)
            if account.waiting >= MAX_WAITING_PER_CLIENT or len(self._running) >= MAX_WAITING:
                raise TooManyBuildsError(SAVED_SECONDS)
            if (wait := account.expected_wait()) > MAX_WAIT:
                raise TooManyBuildsError(wait - MAX_WAIT)
            account.waiting += 1
            task = asyncio.create_task(self._run(account, params))
            self._running[key] = task
            task.add_done_callback(lambda done: self._finished(account, key, done))
        # A client that disconnects must not cancel a build that other clients wait for.
        await asyncio.shield(self._running[key])

    def _finished(self, account: _Client, key: tuple[str, ...], task: "asyncio.Task[None]") -> None:
        account.waiting -= 1
        self._running.pop(key, None)
        if not task.cancelled():
            task.exception()  # marks it as retrieved, in case that no client waits any longer

    def _account(self, client: str) -> _Client:
        account = self._clients.pop(client, None) or _Client()
        self._clients[client] = account
        while len(self._clients) > MAX_CLIENTS:
            self._clients.popitem(last=False)
        return account

    async def _run(self, account: _Client, params: dict[str, Any]) -> None:
        queued = monotonic()
        async with account.turn:  # clients take turns
            await account.wait_for_share()
            async with self._turn:
                if monotonic() - queued > MAX_QUEUED:
                    raise TooManyBuildsError(MAX_WAIT)
                loop = asyncio.get_running_loop()
                result = await loop.run_in_executor(self._thread, self._build, params)
            account.charge(result.seconds)
        if result.error is not None:
            raise InvalidInputError(result.error)
