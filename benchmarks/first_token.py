"""How long a client of `foretrace serve` waits for the first token, and then for each other one.

Needs an environment with vLLM. A real server of SmolLM2 answers one streamed request at a time over
HTTP: bare, with a known goal, and with goals that it sees for the first time. Their tables are
built before the answer begins: of ready-made attributes, of required texts, and of attributes
without calibrated levels, whose strengths the HMM finds first. With --quick, few requests are sent.
"""

import json
import sys
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from foretrace import AttributeStore
from harness import Report, options
from server import serving, steered
from serving import write_attributes
from smollm2 import find_smollm2

EXAMPLES = Path(__file__).parent.parent / "examples"
WORDS = ("lighthouse", "refund", "summer", "engine", "garden", "violin", "bridge", "winter")
TOKENS = 16


class Waited(NamedTuple):
    """The seconds until the first token of an answer, and between two tokens."""

    first: float
    each: float


def main() -> None:
    """Start a server and time requests."""
    arguments = options(__doc__)
    count = 2 if arguments.quick else 8
    report = Report("What a client waits for: SmolLM2, 1,024 states, one request at a time")
    hmm = EXAMPLES / "smollm2-135m"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "attributes"
        goals = requests_of_each_kind(write_attributes(folder, count))
        command = steered(find_smollm2(), hmm, folder, "--tables", Path(scratch) / "tables")
        with serving(command, Path(scratch) / "log") as address:
            for _ in range(3):
                ask(address, {})  # warm up
            for name, requests in goals.items():
                add(report, name, [ask(address, fields) for fields in requests])
    report.publish(arguments.json)


def requests_of_each_kind(uncalibrated: Sequence[str]) -> dict[str, Sequence[Mapping[str, Any]]]:
    """Return as many requests of every kind as there are attributes without levels."""
    count = len(uncalibrated)
    names = sorted(AttributeStore(EXAMPLES / "attributes"))[:count]
    return {
        "bare": [{}] * count,
        "new goal": [{"goal": name} for name in names],
        "known goal": [{"goal": name} for name in names],
        "new required text": [{"must_contain": word} for word in WORDS[:count]],
        "known required text": [{"must_contain": word} for word in WORDS[:count]],
        "new goal without levels": [{"goal": name} for name in uncalibrated],
    }


def ask(address: str, fields: Mapping[str, Any]) -> Waited:
    """Send a streamed request; time its tokens."""
    body = {"model": "lm", "prompt": "Yesterday morning we", "max_tokens": TOKENS, "stream": True}
    body |= {"ignore_eos": True, "vllm_xargs": dict(fields)}
    request = urllib.request.Request(
        f"{address}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer none"},
    )
    times = [perf_counter()]
    with urllib.request.urlopen(request, timeout=120) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                times.append(perf_counter())
    gaps = [after - before for before, after in pairwise(times[1:])]
    return Waited(times[1] - times[0], median(gaps))


def add(report: Report, name: str, waited: Sequence[Waited]) -> None:
    """Add the medians of a kind of request, and its slowest first token."""
    report.add(f"{name}: first token", 1e3 * median(one.first for one in waited), "ms")
    report.add(f"{name}: slowest first token", 1e3 * max(one.first for one in waited), "ms")
    report.add(f"{name}: each other token", 1e3 * median(one.each for one in waited), "ms")


if __name__ == "__main__":
    main()
