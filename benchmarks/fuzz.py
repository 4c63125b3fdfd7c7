"""A hundred thousand requests nobody should send: each is admitted, or refused with a reason.

Random goals and parameters (hypothesis) go through what a server does at admission, with a folder
of real attributes. With --quick, three thousand.
"""

import sys
import tempfile
from pathlib import Path
from time import thread_time
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from engines.vllm.test_params import NAMES, anything
from foretrace.attribute import Attribute, AttributeStore
from foretrace.engines.vllm.params import parse
from foretrace.engines.vllm.table_cache import TableCache
from foretrace.hmm import HMM
from harness import Report, options

WORDS = 200
SLOWEST = 0.05


def main() -> None:
    """Fuzz admission."""
    asked = options(__doc__)
    report = Report("Fuzzing admission")
    with tempfile.TemporaryDirectory() as scratch:
        library = _library(Path(scratch))
        seen: dict[str, int] = {"admitted": 0, "refused": 0, "other": 0}
        times: list[float] = []
        _fuzz(library, 3_000 if asked.quick else 100_000, seen, times)
    report.add("requests", len(times), "", at_least=3_000 if asked.quick else 100_000)
    report.add("admitted", seen["admitted"], "")
    report.add("refused with a reason", seen["refused"], "")
    report.add("raised anything else", seen["other"], "", at_most=0)
    report.add("slowest", 1000 * max(times), "ms", at_most=1000 * SLOWEST)
    report.add("median", 1000 * sorted(times)[len(times) // 2], "ms")
    report.publish(asked.json)


def _library(folder: Path) -> TableCache:
    """Make a library of the attributes that the requests name."""
    store = AttributeStore(folder / "attributes")
    for place, name in enumerate(NAMES):
        weights = torch.rand(WORDS, generator=torch.Generator().manual_seed(place))
        store.add(Attribute.from_weights(weights, name=name.strip('"')))
    hmm = HMM.random(16, WORDS, eos_token_id=0, seed=0)
    return TableCache(hmm, folder / "attributes", folder / "tables", horizon=64)


def _fuzz(library: TableCache, count: int, seen: dict[str, int], times: list[float]) -> None:
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(anything())
    def admit(request: dict[str, Any]) -> None:
        began = thread_time()
        try:
            asked = parse(request)
            if asked is not None:
                library.admit(asked)
            seen["admitted"] += 1
        except ValueError:
            seen["refused"] += 1
        except Exception:
            seen["other"] += 1
        times.append(thread_time() - began)

    while len(times) < count:  # hypothesis may stop early: it has seen all that it can think of
        admit()


if __name__ == "__main__":
    main()
