"""A process that builds lookahead tables for the server's process.

A build would block the server's process, so the server starts this process and sends it requests as
JSON lines. The worker builds the tables of a request in the disk cache and answers with a JSON
line: `{"seconds": 0.1, "error": null}`, or the reason of a refusal as `error`. It runs at a low
priority, and ends when its standard input is closed.

    python -m foretrace.engines.vllm.build_worker
"""

import json
import logging.config
import os
import select
import subprocess
import sys
from pathlib import Path
from threading import Lock
from time import perf_counter, process_time
from typing import IO, TYPE_CHECKING, Any

from foretrace._hardware import available_cores
from foretrace.engines.vllm.build_queue import BuildResult
from foretrace.errors import ForetraceError

if TYPE_CHECKING:
    from foretrace.engines.vllm.table_cache import TableCache

logger = logging.getLogger(__name__)

NICENESS = 10  # leaves about nine tenths of a shared core to the decoding process
TIMEOUT = 120.0  # seconds that one build may take


class BuildWorker:
    """The server's end of the worker process. Builds one request's tables at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = Lock()

    def build(self, params: dict[str, Any]) -> BuildResult:
        """Build the tables of a request.

        Args:
            params: The request's `vllm_xargs`.

        Raises:
            OSError: The worker died or took too long. The next call starts another one.
        """
        with self._lock:
            answer = self._exchange(json.dumps(params).encode() + b"\n")
        return BuildResult(answer["seconds"], answer["error"])

    def start(self) -> None:
        """Start the process now, so that no request waits until its HMM is loaded."""
        with self._lock:
            self._running()

    def stop(self) -> None:
        """Stop the process."""
        with self._lock:
            if self._process is not None:
                self._process.kill()
                self._process.communicate()
                self._process = None

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-m", "foretrace.engines.vllm.build_worker"]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
            )
        return self._process

    def _exchange(self, line: bytes) -> dict[str, Any]:
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(line)
            answer: dict[str, Any] = json.loads(_read_line(process.stdout))
        except (OSError, ValueError) as error:
            process.kill()
            process.communicate()
            self._process = None
            raise OSError(f"The process that builds tables failed: {error}") from error
        return answer


def _read_line(pipe: IO[bytes]) -> bytes:
    """Read one line, or raise TimeoutError."""
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
    """Build tables for the requests on standard input until it is closed."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # output that libraries print goes to the log, not to the answers
    _configure_logging()
    import torch

    from foretrace.engines.vllm import prometheus
    from foretrace.engines.vllm.settings import open_table_cache

    torch.set_num_threads(max(1, available_cores() // 4))
    cache = open_table_cache(torch.device("cpu"), prometheus.observe_cache)
    cache.load_tokenizer()
    os.nice(NICENESS)  # not before: the first request waits until everything is loaded
    for line in sys.stdin.buffer:
        began = process_time()
        error = _build(cache, json.loads(line))
        answer = BuildResult(process_time() - began, error)._asdict()
        answers.write(json.dumps(answer).encode() + b"\n")


def _configure_logging() -> None:
    """Apply the logging configuration that vLLM applies in the server's other processes."""
    if path := os.environ.get("VLLM_LOGGING_CONFIG_PATH"):
        logging.config.dictConfig(json.loads(Path(path).read_text("utf-8")))


def _build(cache: "TableCache", params: dict[str, Any]) -> str | None:
    """Build the tables of a request; return why it is refused, if it is."""
    from foretrace.engines.vllm.params import parse

    try:
        steering_params = parse(params)
        if steering_params is not None:
            cache.admit(steering_params)
    except ForetraceError as error:
        return str(error)
    except Exception:
        logger.exception("Tables could not be built", extra={"goal": params.get("goal")})
        return "The server could not build the tables of this goal; its log says why."
    return None


if __name__ == "__main__":
    main()
