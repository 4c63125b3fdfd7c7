"""The queue of builds, with limits per client, and the process that builds.

A build would block the server's process, so the server starts a process of low priority, and sends
it requests as JSON lines. The process writes a line when it is ready. It builds what a request
needs, and answers with a JSON line.

Builds run one at a time, and clients take turns. A token bucket limits a client to a share of the
CPU time of the process: above it, its builds wait. A request that would wait too long, or that
finds too many builds in the queue, is refused, with the number of seconds after which to try again.

    python -m foretrace.engines.vllm.builds
"""

import asyncio
import json
import logging.config
import os
import select
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import ceil
from pathlib import Path
from threading import Lock
from time import monotonic, perf_counter, process_time
from typing import TYPE_CHECKING, Any, NamedTuple

from foretrace._hardware import available_cores
from foretrace.errors import ForetraceError, InvalidInputError

if TYPE_CHECKING:
    from foretrace.engines.vllm.builder import TableBuilder

logger = logging.getLogger(__name__)

MAX_WAITING_PER_CLIENT, MAX_WAITING = 512, 2_048
SHARE = 0.5  # of the CPU time of the process that one client may use
SAVED_SECONDS = 10.0  # of building that a client may use at once
FIRST_ESTIMATE = 0.5  # seconds of a build, before one is known
MAX_WAIT = 5.0  # seconds that a build may be expected to wait for its client's share
MAX_QUEUED = 60.0  # seconds that a build may be in the queue: clients do not wait forever
MAX_CLIENTS = 4_096  # whose use is remembered
NICENESS = 10  # leaves about nine tenths of a shared core to the decoding process
TIMEOUT = 120.0  # seconds that the process may take to load, and one build
READY = b"ready\n"


class BuildResult(NamedTuple):
    """The result of a build."""

    seconds: float
    """CPU time of the build: other processes of the machine do not count."""
    error: str | None = None
    """The reason of a refusal; None if everything was built."""
    failed: bool = False
    """Whether the server could not build, because of its disk for example."""


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
        self._last_build = FIRST_ESTIMATE

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
    """Builds what requests need, within the limits above."""

    def __init__(self, build: Build) -> None:
        """Queue calls of `build`, which blocks until everything that a request needs is built."""
        self._build, self._turn = build, asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "foretrace-build")
        self._clients: OrderedDict[str, _Client] = OrderedDict()
        self._running: dict[tuple[str, ...], asyncio.Task[None]] = {}

    async def build(self, client: str, keys: Sequence[str], params: dict[str, Any]) -> None:
        """Wait until everything that a request needs is built.

        Args:
            client: The identity of the client that sent the request.
            keys: The keys of the tables and markers. Requests for the same ones share one build.
            params: The request's `vllm_xargs`.

        Raises:
            TooManyBuildsError: The client has to try again later.
            InvalidInputError: The request is refused.
            OSError: The server could not build.
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
                result = await self._charged(account, params)
        if result.failed:
            raise OSError(result.error)
        if result.error is not None:
            raise InvalidInputError(result.error)

    async def _charged(self, account: _Client, params: dict[str, Any]) -> BuildResult:
        """Build, and charge the client. A build that times out or crashes costs its whole time."""
        began, loop = monotonic(), asyncio.get_running_loop()
        try:
            result = await loop.run_in_executor(self._thread, self._build, params)
        except BaseException:
            account.charge(monotonic() - began)
            raise
        account.charge(result.seconds)
        return result


class BuildWorker:
    """The server's end of the process that builds, one request at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self._lock = Lock()

    def build(self, params: dict[str, Any]) -> BuildResult:
        """Build everything that a request needs.

        Args:
            params: The request's `vllm_xargs`.

        Raises:
            OSError: The process died or took too long. The next call starts another one.
        """
        with self._lock:
            return BuildResult(**self._exchange(json.dumps(params).encode() + b"\n"))

    def start(self) -> None:
        """Start the process now, so that no request waits until its HMM is loaded."""
        with self._lock:
            self._running()

    def wait(self) -> None:
        """Wait until the process has loaded its HMM.

        Raises:
            OSError: The process died or took too long. The next call starts another one.
        """
        with self._lock:
            self._ready()

    def stop(self) -> None:
        """Stop the process."""
        with self._lock:
            if self._process is not None:
                self._process.kill()
                self._process.communicate()
                self._process = None

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-m", "foretrace.engines.vllm.builds"]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
            )
            self._is_ready = False
        return self._process

    def _ready(self) -> "subprocess.Popen[bytes]":
        process = self._running()
        if not self._is_ready:
            with self._failures(process):
                _read_line(process)
            self._is_ready = True
        return process

    def _exchange(self, line: bytes) -> dict[str, Any]:
        process = self._ready()
        assert process.stdin is not None
        with self._failures(process):
            process.stdin.write(line)
            answer: dict[str, Any] = json.loads(_read_line(process))
        return answer

    @contextmanager
    def _failures(self, process: "subprocess.Popen[bytes]") -> Iterator[None]:
        """Stop a process that does not answer."""
        try:
            yield
        except (OSError, ValueError) as error:
            process.kill()
            process.communicate()
            self._process = None
            raise OSError(f"The process that builds tables failed: {error}") from error


def _read_line(process: "subprocess.Popen[bytes]") -> bytes:
    """Read a line that a process writes, or raise TimeoutError."""
    pipe = process.stdout
    assert pipe is not None
    line, end = b"", perf_counter() + TIMEOUT
    while not line.endswith(b"\n"):
        if not select.select([pipe], [], [], max(0.0, end - perf_counter()))[0]:
            raise TimeoutError(f"no answer within {TIMEOUT:.0f} s")
        chunk = os.read(pipe.fileno(), 1 << 16)
        if not chunk:
            raise ConnectionError("it ended")
        line += chunk
    return line


def main() -> None:
    """Build for the requests on standard input until it is closed."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # output that libraries print goes to the log, not to the answers
    _configure_logging()
    import torch

    from foretrace.engines.vllm import metrics
    from foretrace.engines.vllm.settings import open_builder

    torch.set_num_threads(max(1, available_cores() // 4))
    builder = open_builder(torch.device("cpu"), metrics.observe_cache)
    builder.load_tokenizer()
    answers.write(READY)
    os.nice(NICENESS)  # not before: the server is ready when everything is loaded
    for line in sys.stdin.buffer:
        began = process_time()
        answer = _build(builder, json.loads(line))
        answer = answer._replace(seconds=process_time() - began)
        answers.write(json.dumps(answer._asdict()).encode() + b"\n")


def _configure_logging() -> None:
    """Apply the logging configuration that vLLM applies in the server's other processes."""
    if path := os.environ.get("VLLM_LOGGING_CONFIG_PATH"):
        logging.config.dictConfig(json.loads(Path(path).read_text("utf-8")))


def _build(builder: "TableBuilder", params: dict[str, Any]) -> BuildResult:
    """Build everything that a request needs."""
    from foretrace.engines.vllm.params import parse

    try:
        steering_params = parse(params)
        if steering_params is not None:
            builder.build(steering_params)
    except ForetraceError as error:
        return BuildResult(0.0, str(error))
    except Exception as error:  # of the disk, or of a file that changes while it is read
        logger.exception("Tables could not be built", extra={"goal": params.get("goal")})
        return BuildResult(0.0, f"The server cannot build tables: {error}", failed=True)
    return BuildResult(0.0)


if __name__ == "__main__":
    main()
