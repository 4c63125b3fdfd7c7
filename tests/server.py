"""A server in a process of its own, `foretrace serve` or `foretrace playground`, over HTTP."""

import asyncio
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import socket
from typing import Any, NamedTuple

API_KEY, HOSTILE_KEY = "none", "hostile"
START_TIMEOUT = 300  # seconds
ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # the scheduler and the LM share a process
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
}


class RealServer(NamedTuple):
    """A running server."""

    address: str
    attributes: Path
    tables: Path
    log: Path

    @property
    def store(self) -> Path:
        """The folder of tables and markers."""
        return self.tables / f"foretrace-{os.getuid()}"

    def built(self) -> set[str]:
        """List the tables and markers on disk."""
        return {path.parent.name for path in self.store.rglob("*") if path.is_file()}

    def leases(self) -> int:
        """Count the descriptors of tables that the server's process holds open."""
        port = self.address.rpartition(":")[2]
        count = 0
        for process in Path("/proc").iterdir():
            with suppress(OSError):
                if f"--port\0{port}\0" in (process / "cmdline").read_text():
                    files = [link.readlink() for link in (process / "fd").iterdir()]
                    count += sum(file.is_relative_to(self.store) for file in files)
        return count


def free_port() -> int:
    """Return a port that no process listens on."""
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(
    command: Sequence[object],
    log: Path,
    ready: str = "/health",
    environment: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """Run a server until the block ends and yield its address, once `ready` answers."""
    port = free_port()
    arguments = [*map(str, command), "--host", "127.0.0.1", "--port", str(port)]
    variables = {**os.environ, **ENVIRONMENT, **(environment or {})}
    with log.open("wb") as file:
        process = subprocess.Popen(arguments, stdout=file, stderr=file, env=variables)
    address = f"http://127.0.0.1:{port}"
    try:
        try:
            wait_for(process, address + ready)
        except RuntimeError as error:
            raise RuntimeError(f"{error} {log.read_text('utf-8', 'replace')[-3000:]}") from None
        yield address
    finally:
        process.terminate()
        process.wait(60)


def steered(model: Path, hmm: Path, attributes: Path, *options: object) -> list[object]:
    """Return the command of a small server on a CPU."""
    command: list[object] = [sys.executable, "-m", "foretrace", "serve", model, "--hmm", hmm]
    command += ["--attributes", attributes, "--served-model-name", "lm", "--enforce-eager"]
    return [*command, "--dtype", "float32", "--max-model-len", 256, *options]


def wait_for(process: "subprocess.Popen[bytes]", address: str) -> None:
    """Wait until a server answers; raise RuntimeError if it ends or does not answer in time."""
    end = time.monotonic() + START_TIMEOUT
    while time.monotonic() < end and process.poll() is None:
        try:
            urllib.request.urlopen(address, timeout=5).close()
        except OSError:
            time.sleep(0.5)
        else:
            return
    raise RuntimeError(f"Nothing answers at {address}.")


def ask_all(
    address: str,
    requests: Sequence[Mapping[str, Any]],
    concurrency: int = 1000,
    retries: int = 0,
) -> list[Any]:
    """Send completion requests concurrently with the OpenAI SDK; return answers or exceptions."""
    return asyncio.run(_ask_all(address, requests, concurrency, retries))


async def _ask_all(
    address: str, requests: Sequence[Mapping[str, Any]], concurrency: int, retries: int
) -> list[Any]:
    import httpx
    from openai import AsyncOpenAI

    limits = httpx.Limits(max_connections=concurrency)
    http = httpx.AsyncClient(limits=limits, timeout=600)
    async with AsyncOpenAI(
        base_url=f"{address}/v1", api_key=API_KEY, max_retries=retries, http_client=http
    ) as client:
        semaphore = asyncio.Semaphore(concurrency)

        async def ask(request: Mapping[str, Any]) -> Any:
            async with semaphore:
                return await client.completions.create(model="lm", **request)

        return await asyncio.gather(*map(ask, requests), return_exceptions=True)


def completion(
    prompt: Sequence[int] | str, goal: Mapping[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    """Make a greedy request, steered or plain, whose answer contains token ids."""
    extra: dict[str, Any] = {"return_token_ids": True}
    if goal is not None:
        extra["vllm_xargs"] = dict(goal)
    return {"prompt": prompt, "temperature": 0, **options, "extra_body": extra}
