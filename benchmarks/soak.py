"""A server under strain: random goals, aborts, bad requests, and attributes that come and go.

Needs the environment with vLLM in it. A real server of SmolLM2, asked over HTTP for ten minutes, or
for a few seconds with --quick: nothing crashes, every valid request is answered, and memory does
not grow once it is warm.
"""

import asyncio
import os
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))


from foretrace.hmm import HMM
from harness import Report, options
from random_attributes import write_random
from server import completion, serving, steered
from smollm2 import find_smollm2

EXAMPLE = Path(__file__).parent.parent / "examples" / "smollm2-135m"
STABLE, CHANGING = 12, 12  # attributes that stay, and that are replaced, damaged and removed
CLIENTS = 24
BAD = ["nobody", "s0 &", "../s0", "s0" * 600, "~" * 300, "s0 & " * 40 + "s0", '"\u2603"']


@dataclass
class Tally:
    """What became of the requests."""

    answered: int = 0
    refused: int = 0
    aborted: int = 0
    wrong: list[str] = field(default_factory=list)
    """What should not have happened."""


def main() -> None:
    """Strain a server."""
    given = options(__doc__)
    seconds = 4 if given.quick else 600
    report = Report(f"A server under strain for {seconds} s")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "attributes"
        for place in range(STABLE):
            _write(folder, f"s{place}", place)
        tables = ["--tables", Path(scratch) / "tables", "--memory", 8, "--disk", 64]
        command = steered(find_smollm2(), EXAMPLE, folder, *tables, "--max-num-seqs", 16)
        with serving(command, Path(scratch) / "log") as address:
            tally, sizes = asyncio.run(_strain(address, folder, seconds))
            log = (Path(scratch) / "log").read_text("utf-8", "replace")
    warm = [size for at, size in sizes if at > 0.3 * seconds]
    report.add("answered", tally.answered, "requests")
    report.add("refused with HTTP 400", tally.refused, "requests")
    report.add("aborted by the client", tally.aborted, "requests")
    report.add("answered wrongly, or not", len(tally.wrong), "requests", at_most=0)
    report.add("tracebacks in the log", log.count("Traceback"), "", at_most=0)
    report.add("memory of all processes, warm", warm[0], "MB")
    report.add("memory at the end / warm", warm[-1] / warm[0], "", at_most=1.05)
    report.publish(given.json)
    for wrong in (*tally.wrong[:5], *log.split("Traceback")[1:3]):
        sys.stderr.write(f"{wrong[:3000]}\n")


def _write(folder: Path, name: str, seed: int) -> None:
    hmm = HMM.from_pretrained(EXAMPLE)
    known = hmm.config.tokenizer_fingerprint
    write_random(folder, name, hmm.vocab_size, share=0.1, known=known, seed=seed)


async def _strain(
    address: str, folder: Path, seconds: float
) -> tuple[Tally, list[tuple[float, float]]]:
    """Run clients, and somebody who changes the folder, until the time is over."""
    from httpx import AsyncClient, Limits
    from openai import AsyncOpenAI

    tally, began = Tally(), time.monotonic()
    sizes: list[tuple[float, float]] = []
    http = AsyncClient(limits=Limits(max_connections=100), timeout=300)
    async with AsyncOpenAI(
        base_url=f"{address}/v1", api_key="none", max_retries=0, http_client=http
    ) as client:
        end = began + seconds
        work = [_client(client, tally, end, number) for number in range(CLIENTS)]
        work.append(_changes(folder, end))
        work.append(_watch(sizes, began, end))
        await asyncio.gather(*work)
    return tally, sizes


async def _client(client: Any, tally: Tally, end: float, number: int) -> None:
    """Ask for this and that."""
    chance = random.Random(number)
    while time.monotonic() < end:
        kind = chance.choices(["stable", "changing", "plain", "bad", "abort"], [5, 2, 2, 2, 1])[0]
        goal = _goal(kind, chance)
        prompt = [0, *(chance.randrange(100, 40_000) for _ in range(chance.randrange(1, 60)))]
        request = completion(prompt, goal, max_tokens=chance.randrange(1, 40), temperature=1.0)
        try:
            asking = client.completions.create(model="lm", **request)
            if kind == "abort":
                await asyncio.wait_for(asking, chance.random())
            else:
                await asking
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


def _goal(kind: str, chance: random.Random) -> dict[str, Any] | None:
    if kind == "plain":
        return None
    if kind == "bad":
        return {"goal": chance.choice(BAD)}
    names = [f"s{chance.randrange(STABLE)}" for _ in range(2)]
    if kind == "changing":
        names = [f"c{chance.randrange(CHANGING)}" for _ in range(2)]
    text = chance.choice(["{0}", "~{0}", "{0} & {1}", "{0} | {1}", "{0} & ~{1}"]).format(*names)
    return {"goal": text, "strength": chance.uniform(0.5, 5), "shift": chance.uniform(-3, 0)}


async def _changes(folder: Path, end: float) -> None:
    """Add, replace, damage and remove attributes."""
    chance = random.Random(-1)
    while time.monotonic() < end:
        await asyncio.sleep(0.3)
        path = folder / f"c{chance.randrange(CHANGING)}.safetensors"
        kind = chance.choice(["write", "write", "damage", "remove"])
        if kind == "write":
            await asyncio.to_thread(_write, folder, path.stem, chance.randrange(10**6))
        elif kind == "damage" and path.exists():
            content = path.read_bytes()
            path.write_bytes(content[: chance.randrange(len(content))])
        elif kind == "remove":
            path.unlink(missing_ok=True)


async def _watch(sizes: list[tuple[float, float]], began: float, end: float) -> None:
    while time.monotonic() < end:
        await asyncio.sleep(1)
        sizes.append((time.monotonic() - began, _memory(os.getpid())))


def _memory(parent: int) -> float:
    """Sum the resident memory of all descendants, in MB."""
    children: dict[int, list[int]] = {}
    resident: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status = (entry / "status").read_text()
            except OSError:
                continue
            facts = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
            children.setdefault(int(facts["PPid"]), []).append(int(entry.name))
            resident[int(entry.name)] = float(facts.get("VmRSS", "0 kB").split()[0]) / 1024
    waiting, total = list(children.get(parent, [])), 0.0
    while waiting:
        process = waiting.pop()
        total += resident.get(process, 0.0)
        waiting += children.get(process, [])
    return total


if __name__ == "__main__":
    main()
