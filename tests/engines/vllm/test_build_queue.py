"""Limits on what clients make the server build."""

import asyncio
import time
from threading import Event
from typing import Any

import pytest

from foretrace.engines.vllm import build_queue
from foretrace.engines.vllm.build_queue import BuildQueue, BuildResult, TooManyBuildsError
from foretrace.errors import InvalidInputError


def _wait(params: dict[str, Any]) -> BuildResult:
    time.sleep(params["seconds"])
    return BuildResult(params["seconds"])


async def _attempts(
    queue: BuildQueue, client: str, count: int, seconds: float
) -> list[BaseException | None]:
    calls = [queue.build(client, [f"{client}{i}"], {"seconds": seconds}) for i in range(count)]
    return await asyncio.gather(*calls, return_exceptions=True)


def test_a_client_has_a_bounded_number_of_builds_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_queue, "MAX_WAITING_PER_CLIENT", 4)

    async def main() -> list[BaseException | None]:
        return await _attempts(BuildQueue(_wait), "greedy", 20, 0.01)

    refused = [error for error in asyncio.run(main()) if error is not None]
    assert len(refused) == 20 - build_queue.MAX_WAITING_PER_CLIENT
    assert all(isinstance(error, TooManyBuildsError) for error in refused)


def test_a_client_above_its_share_waits_and_slows_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build_queue, "SAVED_SECONDS", 0.1)

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
    assert greedy >= 3 * 0.1 / build_queue.SHARE
    assert modest < greedy


def test_a_request_that_would_wait_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_queue, "monotonic", lambda: 0.0)  # no time is saved up meanwhile

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
    monkeypatch.setattr(build_queue, "MAX_QUEUED", 0.05)

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
    monkeypatch.setattr(build_queue, "MAX_WAITING", 5)

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


def test_a_refusal_reaches_everybody_who_waits_and_costs_its_time() -> None:
    def refuse(params: dict[str, Any]) -> BuildResult:
        return BuildResult(3.0, "There is no such attribute.")

    async def main() -> None:
        queue = BuildQueue(refuse)
        calls = [queue.build("client", ["a"], {}) for _ in range(2)]
        errors = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(error) for error in errors] == [InvalidInputError] * 2
        assert queue._account("client").balance() < build_queue.SAVED_SECONDS - 2

    asyncio.run(main())


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
