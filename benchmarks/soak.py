"""Soak test of a server: random goals, aborts, invalid requests, attributes that change.

Needs an environment with vLLM. Sends requests to a server of SmolLM2 over HTTP for ten minutes, or
for twenty seconds with --quick. Nothing may crash, every valid request must be answered, and memory
must not grow after the warm-up. Every other phase, a hostile client with a key of its own sends new
goals as fast as it can. The latency of a client with a known goal is compared between the phases.
"""

import asyncio
import os
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))


from foretrace.hmm import HMM
from harness import Report, options
from random_attributes import write_random
from server import API_KEY, HOSTILE_KEY, completion, serving, steered
from smollm2 import find_smollm2

EXAMPLE = Path(__file__).parent.parent / "examples" / "smollm2-135m"
STABLE, CHANGING = 12, 12  # attributes that stay; that are replaced, damaged and removed
CLIENTS = 24
HOSTILE = 16  # concurrent requests of the hostile client
PHASES, QUICK_PHASES = 10, 2  # without and with the hostile client, in turns
KINDS = {"stable": 5, "changing": 2, "plain": 2, "bad": 2, "abort": 1}  # of requests, and weights
KNOWN = completion("One day", {"goal": "s0"}, max_tokens=16)
BAD = ["nobody", "s0 &", "../s0", "s0" * 600, "~" * 300, "s0 & " * 40 + "s0", '"\u2603"']


@dataclass
class Tally:
    """The outcomes of all requests."""

    answered: int = 0
    refused: int = 0
    aborted: int = 0
    wrong: list[str] = field(default_factory=list)
    """Descriptions of requests that were answered wrongly or not at all."""
    hostile: int = 0
    """Requests of the hostile client."""
    hostile_refused: int = 0
    """Those that were refused with HTTP 429."""
    latencies: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    """Seconds of requests with a known goal, without and with the hostile client."""


def main() -> None:
    """Run the soak test."""
    arguments = options(__doc__)
    seconds = 20 if arguments.quick else 600
    report = Report(f"A server under load for {seconds} s")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "attributes"
        for index in range(STABLE):
            _write(folder, f"s{index}", index)
        settings = ["--tables", Path(scratch) / "tables", "--memory", 8, "--disk", 64]
        settings += ["--max-num-seqs", 16, "--api-key", API_KEY, HOSTILE_KEY]
        command = steered(find_smollm2(), EXAMPLE, folder, *settings)
        with serving(command, Path(scratch) / "log") as address:
            tally, sizes = asyncio.run(_load(address, folder, seconds))
            log = (Path(scratch) / "log").read_text("utf-8", "replace")
    warm = [size for elapsed, size in sizes if elapsed > 0.3 * seconds]
    report.add("answered", tally.answered, "requests")
    report.add("refused with HTTP 400", tally.refused, "requests")
    report.add("aborted by the client", tally.aborted, "requests")
    report.add("answered wrongly or not at all", len(tally.wrong), "requests", at_most=0)
    quiet, busy = map(median, tally.latencies)
    report.add("requests of the hostile client", tally.hostile, "requests")
    report.add("of these refused with HTTP 429", tally.hostile_refused, "requests")
    report.add("median latency of a known goal", quiet, "s")
    report.add("latency beside the hostile client / without", busy / quiet, "", at_most=1.3)
    report.add("tracebacks in the log", log.count("Traceback"), "", at_most=0)
    report.add("memory of all processes after warm-up", warm[0], "MB")
    report.add("memory at the end / after warm-up", warm[-1] / warm[0], "", at_most=1.05)
    report.publish(arguments.json)
    for problem in (*tally.wrong[:5], *log.split("Traceback")[1:3]):
        sys.stderr.write(f"{problem[:3000]}\n")


def _write(folder: Path, name: str, seed: int) -> None:
    hmm = HMM.from_pretrained(EXAMPLE)
    fingerprint = hmm.config.tokenizer_fingerprint
    write_random(folder, name, hmm.vocab_size, share=0.1, known=fingerprint, seed=seed)


async def _load(
    address: str, folder: Path, seconds: float
) -> tuple[Tally, list[tuple[float, float]]]:
    """Run the clients, and a task that changes the folder, until the time is over."""
    from httpx import AsyncClient, Limits
    from openai import AsyncOpenAI

    tally = Tally()
    sizes: list[tuple[float, float]] = []
    http = AsyncClient(limits=Limits(max_connections=100), timeout=300)
    async with AsyncOpenAI(
        base_url=f"{address}/v1", api_key=API_KEY, max_retries=20, http_client=http
    ) as client:
        await client.completions.create(model="lm", **KNOWN)  # its table is built now
        start = time.monotonic()
        end = start + seconds
        phases = Phases(start, seconds, PHASES if seconds > 100 else QUICK_PHASES)
        hostile, numbers = client.with_options(api_key=HOSTILE_KEY, max_retries=0), count()
        tasks = [_client(client, tally, end, seed) for seed in range(CLIENTS)]
        tasks += [_hostile_client(hostile, tally, phases, numbers) for _ in range(HOSTILE)]
        tasks.append(_known_client(client, tally, phases))
        tasks.append(_change_attributes(folder, end))
        tasks.append(_watch_memory(sizes, start, end))
        await asyncio.gather(*tasks)
    return tally, sizes


@dataclass(frozen=True)
class Phases:
    """The phases of a run: the hostile client sends in every second one."""

    start: float
    seconds: float
    count: int

    def current(self) -> int | None:
        """Return 1 if the hostile client sends now, 0 if not, and None after the end."""
        elapsed = (time.monotonic() - self.start) / self.seconds
        return int(elapsed * self.count) % 2 if elapsed < 1 else None


async def _known_client(client: Any, tally: Tally, phases: Phases) -> None:
    """Measure the latency of requests whose table was built before."""
    while (phase := phases.current()) is not None:
        start = time.monotonic()
        await client.completions.create(model="lm", **KNOWN)
        if phases.current() == phase:
            tally.latencies[phase].append(time.monotonic() - start)


async def _hostile_client(client: Any, tally: Tally, phases: Phases, numbers: "count[int]") -> None:
    """Send goals that nobody used before, one after the other."""
    from openai import RateLimitError

    while (phase := phases.current()) is not None:
        if phase == 0:
            await asyncio.sleep(0.05)
            continue
        number = next(numbers)
        text = f"never {number} again, and once more {number}"
        request = completion("One day", {"goal": f's{number % STABLE} & ~contains("{text}")'})
        tally.hostile += 1
        try:
            await client.completions.create(model="lm", max_tokens=1, **request)
        except RateLimitError:
            tally.hostile_refused += 1


async def _client(client: Any, tally: Tally, end: float, seed: int) -> None:
    """Send random requests one after the other."""
    generator = random.Random(seed)
    while time.monotonic() < end:
        (kind,) = generator.choices([*KINDS], [*KINDS.values()])
        goal = _goal(kind, generator)
        prompt = [0, *(generator.randrange(100, 40_000) for _ in range(generator.randrange(1, 60)))]
        request = completion(prompt, goal, max_tokens=generator.randrange(1, 40), temperature=1.0)
        try:
            answer = client.completions.create(model="lm", **request)
            if kind == "abort":
                await asyncio.wait_for(answer, generator.random())
            else:
                await answer
            tally.answered += 1
            if kind == "bad":
                tally.wrong.append(f"answered: {goal}")
        except TimeoutError:
            tally.aborted += 1
        except Exception as error:
            expected = kind in ("bad", "changing") and getattr(error, "status_code", 0) == 400
            tally.refused += expected
            if not expected:
                tally.wrong.append(f"{kind} {goal}: {error!r}")


def _goal(kind: str, generator: random.Random) -> dict[str, Any] | None:
    """Return the parameters of a random request, or None for a plain one."""
    if kind == "plain":
        return None
    if kind == "bad":
        return {"goal": generator.choice(BAD)}
    names = [f"s{generator.randrange(STABLE)}" for _ in range(2)]
    if kind == "changing":
        names = [f"c{generator.randrange(CHANGING)}" for _ in range(2)]
    text = generator.choice(["{0}", "~{0}", "{0} & {1}", "{0} | {1}", "{0} & ~{1}"]).format(*names)
    if generator.random() < 0.5:
        return {"goal": text, "level": generator.choice(["mild", "medium", "strong"])}
    return {"goal": text, "transform": [generator.uniform(0.5, 5), generator.uniform(-3, 0)]}


async def _change_attributes(folder: Path, end: float) -> None:
    """Add, replace, damage and remove attributes."""
    generator = random.Random(-1)
    while time.monotonic() < end:
        await asyncio.sleep(0.3)
        path = folder / f"c{generator.randrange(CHANGING)}.safetensors"
        kind = generator.choice(["write", "write", "damage", "remove"])
        if kind == "write":
            await asyncio.to_thread(_write, folder, path.stem, generator.randrange(10**6))
        elif kind == "damage" and path.exists():
            content = path.read_bytes()
            path.write_bytes(content[: generator.randrange(len(content))])
        elif kind == "remove":
            path.unlink(missing_ok=True)


async def _watch_memory(sizes: list[tuple[float, float]], start: float, end: float) -> None:
    """Record the elapsed seconds and the memory, once a second."""
    while time.monotonic() < end:
        await asyncio.sleep(1)
        sizes.append((time.monotonic() - start, _memory(os.getpid())))


def _memory(parent: int) -> float:
    """Return the resident memory of all descendants, in MB."""
    children: dict[int, list[int]] = {}
    resident: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status = (entry / "status").read_text()
            except OSError:
                continue
            fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
            children.setdefault(int(fields["PPid"]), []).append(int(entry.name))
            resident[int(entry.name)] = float(fields.get("VmRSS", "0 kB").split()[0]) / 1024
    pending, total = list(children.get(parent, [])), 0.0
    while pending:
        process = pending.pop()
        total += resident.get(process, 0.0)
        pending += children.get(process, [])
    return total


if __name__ == "__main__":
    main()
