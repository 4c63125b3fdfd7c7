"""The queue of builds, its limits, and the process that builds: a real one."""

import asyncio
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from foretrace.engines.vllm import builds
from foretrace.engines.vllm.builds import (
    BuildQueue,
    BuildResult,
    BuildWorker,
    TooManyBuildsError,
)
from foretrace.errors import InvalidInputError
from small_server import small_server
from tiny_lm import byte_tokenizer


def _wait(params: dict[str, Any]) -> BuildResult:
    time.sleep(params["seconds"])
    return BuildResult(params["seconds"])


async def _attempts(
    queue: BuildQueue, client: str, count: int, seconds: float
) -> list[BaseException | None]:
    calls = [queue.build(client, [f"{client}{i}"], {"seconds": seconds}) for i in range(count)]
    return await asyncio.gather(*calls, return_exceptions=True)


def test_a_client_has_a_bounded_number_of_builds_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds, "MAX_WAITING_PER_CLIENT", 4)

    async def main() -> list[BaseException | None]:
        return await _attempts(BuildQueue(_wait), "greedy", 20, 0.01)

    refused = [error for error in asyncio.run(main()) if error is not None]
    assert len(refused) == 20 - builds.MAX_WAITING_PER_CLIENT
    assert all(isinstance(error, TooManyBuildsError) for error in refused)


def test_a_client_above_its_share_waits_and_slows_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(builds, "SAVED_SECONDS", 0.1)

    async def main() -> tuple[float, float]:
        queue, began = BuildQueue(lambda params: BuildResult(0.1)), time.monotonic()
        greedy = asyncio.create_task(_attempts(queue, "greedy", 5, 0.0))
        await asyncio.sleep(0.05)
        await queue.build("modest", ["other"], {})
        modest = time.monotonic() - began
        assert await greedy == [None] * 5
        return time.monotonic() - began, modest

    greedy, modest = asyncio.run(main())
    # The first build uses what was saved. The others cost 0.1 s each, at half of the time.
    assert greedy >= 3 * 0.1 / builds.SHARE
    assert modest < greedy


def test_a_request_that_would_wait_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds, "monotonic", lambda: 0.0)  # no time is saved up meanwhile

    async def main() -> TooManyBuildsError:
        queue = BuildQueue(lambda params: BuildResult(11.0))
        await queue.build("greedy", ["first"], {})
        waiting = asyncio.create_task(queue.build("greedy", ["second"], {}))
        await asyncio.sleep(0)
        with pytest.raises(TooManyBuildsError) as refused:
            await queue.build("greedy", ["third"], {})
        await queue.build("modest", ["other"], {})  # is not affected
        waiting.cancel()
        return refused.value

    error = asyncio.run(main())
    # 1 s is owed and one build of 11 s waits: 24 s at half of the time, 19 more than allowed.
    assert error.retry_after == 19
    assert "Try again in 19 s" in str(error)


def test_a_build_that_was_queued_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds, "MAX_QUEUED", 0.05)

    async def main() -> list[BaseException | None]:
        return await _attempts(BuildQueue(_wait), "client", 3, 0.1)

    first, *others = asyncio.run(main())
    assert first is None
    assert all(isinstance(error, TooManyBuildsError) for error in others)


def test_clients_take_turns() -> None:
    order: list[str] = []

    def build(params: dict[str, Any]) -> BuildResult:
        order.append(params["client"])
        return BuildResult(0.0)

    async def main() -> None:
        queue = BuildQueue(build)
        calls = [
            queue.build(client, [f"{client}{i}"], {"client": client})
            for client in ("greedy", "modest")
            for i in range(4 if client == "greedy" else 1)
        ]
        await asyncio.gather(*calls)

    asyncio.run(main())
    assert order.index("modest") <= 1


def test_all_clients_together_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds, "MAX_WAITING", 5)

    async def main() -> list[BaseException | None]:
        queue = BuildQueue(_wait)
        calls = [queue.build(f"client{i}", [str(i)], {"seconds": 0.01}) for i in range(9)]
        return await asyncio.gather(*calls, return_exceptions=True)

    assert sum(error is None for error in asyncio.run(main())) == 5


def test_requests_for_the_same_tables_share_a_build() -> None:
    built: list[dict[str, Any]] = []

    def build(params: dict[str, Any]) -> BuildResult:
        built.append(params)
        return BuildResult(0.0)

    async def main() -> None:
        queue = BuildQueue(build)
        await asyncio.gather(*(queue.build(f"client{i}", ["a", "b"], {}) for i in range(6)))

    asyncio.run(main())
    assert len(built) == 1


def test_a_refusal_reaches_everybody_who_waits() -> None:
    def refuse(params: dict[str, Any]) -> BuildResult:
        return BuildResult(3.0, "There is no such attribute.")

    async def main() -> None:
        queue = BuildQueue(refuse)
        calls = [queue.build("client", ["a"], {}) for _ in range(2)]
        errors = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(error) for error in errors] == [InvalidInputError] * 2

    asyncio.run(main())


def test_a_server_that_cannot_build_is_not_the_clients_fault() -> None:
    async def main() -> None:
        queue = BuildQueue(lambda params: BuildResult(0.0, "No space left", failed=True))
        with pytest.raises(OSError, match="No space left"):
            await queue.build("client", ["a"], {})

    asyncio.run(main())


def test_a_first_burst_is_bounded_by_an_estimate() -> None:
    """Before any build has ended: the share of ten seconds, and what may wait for it."""

    async def main() -> list[BaseException | None]:
        release = Event()
        queue = BuildQueue(lambda params: BuildResult(float(not release.wait(5))))
        calls = [asyncio.create_task(queue.build("one", [str(i)], {})) for i in range(512)]
        await asyncio.sleep(0.05)
        release.set()
        return await asyncio.gather(*calls, return_exceptions=True)

    accepted = [error for error in asyncio.run(main()) if error is None]
    seconds = builds.SAVED_SECONDS + builds.SHARE * builds.MAX_WAIT
    assert len(accepted) <= seconds / builds.FIRST_ESTIMATE + 1


def test_a_build_that_fails_costs_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds, "SAVED_SECONDS", 0.05)
    monkeypatch.setattr(builds, "FIRST_ESTIMATE", 0.0)

    def crash(params: dict[str, Any]) -> BuildResult:
        time.sleep(0.2)
        raise OSError("no answer within 120 s")

    async def main() -> float:
        queue = BuildQueue(crash)
        with pytest.raises(OSError, match="no answer"):
            await queue.build("client", ["a"], {})
        began = time.monotonic()
        with pytest.raises(OSError, match="no answer"):
            await queue.build("client", ["b"], {})
        return time.monotonic() - began

    # It owes 0.15 s, which take 0.3 s at half of the time.
    assert asyncio.run(main()) > 0.2 + 0.25


def test_a_client_that_gives_up_ends_nobodys_build() -> None:
    release = Event()
    built: list[int] = []

    def build(params: dict[str, Any]) -> BuildResult:
        release.wait(5)
        built.append(1)
        return BuildResult(0.0)

    async def main() -> None:
        queue = BuildQueue(build)
        first = asyncio.create_task(queue.build("one", ["a"], {}))
        await asyncio.sleep(0.01)
        second = asyncio.create_task(queue.build("two", ["a"], {}))
        await asyncio.sleep(0.01)
        first.cancel()
        release.set()
        await second

    asyncio.run(main())
    assert built == [1]


TOKENIZER = byte_tokenizer(["hello"], 257)


@pytest.fixture
def tables(tmp_path: Path) -> Iterator[Path]:
    """Set the environment of a server; return the folder of its tables."""
    pytest.importorskip("prometheus_client", reason="needs the environment with vLLM in it")
    with small_server(tmp_path, TOKENIZER):
        yield tmp_path / "tables"


@pytest.fixture
def worker() -> Iterator[BuildWorker]:
    worker = BuildWorker()
    yield worker
    worker.stop()


@pytest.mark.vllm
def test_the_process_builds_refuses_and_starts_again(tables: Path, worker: BuildWorker) -> None:
    worker.wait()
    result = worker.build({"goal": "~a0", "after": "</t>"})
    assert result.error is None
    assert result.seconds > 0
    (folder,) = tables.iterdir()
    assert len(list(folder.iterdir())) == 2  # a table and a marker
    refused = worker.build({"goal": "absent"})
    assert not refused.failed
    assert "no attribute called absent" in str(refused.error)
    worker.stop()
    assert worker.build({"goal": "a0"}).error is None
    shutil.rmtree(folder)  # a disk that nothing can be written to
    folder.write_bytes(b"")
    failed = worker.build({"goal": "a0 & ~a0"})
    assert failed.failed
    assert "cannot build" in str(failed.error)


@pytest.mark.vllm
def test_a_process_that_cannot_start_is_an_error(
    tables: Path, worker: BuildWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORETRACE_SERVE_HMM", str(tables / "absent"))
    for call in (worker.wait, lambda: worker.build({"goal": "a0"})):
        with pytest.raises(OSError, match="builds tables failed"):
            call()
