"""Fuzz admission: every random request is accepted, or refused with a reason.

Hypothesis generates 100,000 goals and parameters (3,000 with --quick). Each is admitted as the
server does it, with a folder of attributes.
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from time import thread_time
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from engines.vllm.test_params import NAMES, anything
from foretrace.attribute import Attribute, AttributeStore
from foretrace.engines.vllm.builder import TableBuilder
from foretrace.engines.vllm.params import parse
from foretrace.engines.vllm.table_store import TableStore
from foretrace.hmm import HMM
from harness import Report, options

VOCAB_SIZE = 200
MAX_SECONDS = 0.05


def main() -> None:
    """Fuzz admission."""
    arguments = options(__doc__)
    report = Report("Fuzzing admission")
    with tempfile.TemporaryDirectory() as scratch:
        library = _library(Path(scratch))
        outcomes: dict[str, int] = {"admitted": 0, "refused": 0, "other": 0}
        times: list[float] = []
        _fuzz(library, 3_000 if arguments.quick else 100_000, outcomes, times)
    report.add("requests", len(times), "", at_least=3_000 if arguments.quick else 100_000)
    report.add("admitted", outcomes["admitted"], "")
    report.add("refused with a reason", outcomes["refused"], "")
    report.add("raised anything else", outcomes["other"], "", at_most=0)
    report.add("slowest", 1000 * max(times), "ms", at_most=1000 * MAX_SECONDS)
    report.add("median", 1000 * sorted(times)[len(times) // 2], "ms")
    report.publish(arguments.json)


def _library(folder: Path) -> TableBuilder:
    """Build a library with the attributes that the requests name."""
    store = AttributeStore(folder / "attributes")
    for seed, name in enumerate(NAMES):
        weights = torch.rand(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
        attribute = Attribute.from_weights(weights, name=name.strip('"'))
        config = replace(attribute.config, levels={"mild": 0.5, "medium": 1.0, "strong": 2.0})
        store.add(replace(attribute, config=config))
    hmm = HMM.random(16, VOCAB_SIZE, eos_token_id=0, seed=0)
    return TableBuilder(hmm, folder / "attributes", TableStore(folder / "tables", 1 << 33))


def _fuzz(library: TableBuilder, count: int, outcomes: dict[str, int], times: list[float]) -> None:
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(anything())
    def admit(request: dict[str, Any]) -> None:
        start = thread_time()
        try:
            asked = parse(request)
            if asked is not None:
                library.build(asked)
            outcomes["admitted"] += 1
        except ValueError:
            outcomes["refused"] += 1
        except Exception:
            outcomes["other"] += 1
        times.append(thread_time() - start)

    while len(times) < count:  # hypothesis may stop early
        admit()


if __name__ == "__main__":
    main()
