"""Throughput of vLLM with and without steering: 64 concurrent requests, 1 to 256 goals.

Needs an environment with vLLM. Runs SmolLM2 with the HMM of `examples/` in two engines of one
process, one of them without foretrace, in turns. With --quick there are fewer turns, and only 8
goals.
"""

import os
import sys
import tempfile
from pathlib import Path
from shutil import copytree
from statistics import median
from time import perf_counter, process_time
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))


from foretrace._hardware import default_dtype
from foretrace.engines.vllm.settings import Settings
from foretrace.hmm import HMM
from harness import Report, options
from random_attributes import write_random
from smollm2 import find_smollm2

EXAMPLES = Path(__file__).parent.parent / "examples"
REQUESTS, LENGTH, GOALS, ALL_GOALS = 64, 16, 8, 256
TOKENS = REQUESTS * LENGTH
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def main() -> None:
    """Measure throughput."""
    arguments = options(__doc__)
    report = Report("vLLM with and without steering, SmolLM2, 1,024 states")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        names = write_attributes(folder / "attributes", GOALS if arguments.quick else ALL_GOALS)
        hmm = str(EXAMPLES / "smollm2-135m")
        settings = Settings(hmm, str(folder / "attributes"), str(folder / "tables"))
        os.environ.update(ENVIRONMENT | settings.to_environment())
        engines = _engine([]), _engine(["foretrace.engines.vllm:SteeringProcessor"])
        turns = 2 if arguments.quick else 6
        _compare(report, "8 goals", engines, _requests(names[:GOALS]), turns, at_least=0.82)
        if not arguments.quick:
            for count in (1, REQUESTS, ALL_GOALS):
                name = f"{count} goals" if count <= REQUESTS else f"{count} goals over the run"
                _compare(report, name, engines, _requests(names[:count]), turns)
            ready = [{"goal": path.stem} for path in sorted((EXAMPLES / "attributes").glob("*.s*"))]
            _compare(report, "ready-made attributes, medium", engines, ready * GOALS, turns)
        plain: list[Any] = [None] * REQUESTS
        _compare(report, "plain requests with foretrace loaded", engines, plain, turns)
    report.publish(arguments.json)


def write_attributes(folder: Path, count: int) -> list[str]:
    """Write attributes with a weight below 1 for a tenth of the tokens; return their names.

    The ready-made attributes are copied as well.
    """
    copytree(EXAMPLES / "attributes", folder)
    hmm = HMM.from_pretrained(EXAMPLES / "smollm2-135m")
    names = [f"a{index}" for index in range(count)]
    fingerprint = hmm.config.tokenizer_fingerprint
    for seed, name in enumerate(names):
        write_random(folder, name, hmm.vocab_size, share=0.1, known=fingerprint, seed=seed)
    return names


def _requests(names: list[str]) -> list[Any]:
    """Return the goals of as many batches as it takes to use all attributes."""
    count = max(REQUESTS, len(names))
    return [{"goal": names[index % len(names)], "strength": 2.0} for index in range(count)]


def _compare(
    report: Report,
    name: str,
    engines: tuple[Any, Any],
    goals: list[Any],
    turns: int,
    at_least: float | None = None,
) -> None:
    """Run both engines in turns, the second with goals, after a run that builds the tables."""
    batches = [goals[first : first + REQUESTS] for first in range(0, len(goals), REQUESTS)]
    for batch in batches:
        _generate(engines[1], batch)
    bare, steered = [], []
    for turn in range(max(turns, len(batches))):
        bare.append(_generate(engines[0], [None] * REQUESTS))
        steered.append(_generate(engines[1], batches[turn % len(batches)]))
    pairs = list(zip(bare, steered, strict=True))
    wall = [one.wall / other.wall for one, other in pairs]
    processor = [one.processor / other.processor for one, other in pairs]
    report.add(f"{name}: bare", TOKENS / median(one.wall for one in bare), "tokens/s")
    report.add(f"{name}: steered / bare", median(wall), "", at_least=at_least)
    report.add(f"{name}: steered / bare, lowest of {len(pairs)}", min(wall), "")
    report.add(f"{name}: steered / bare, by CPU time", median(processor), "")
    print(f"{name}: {median(wall):.2f}", file=sys.stderr, flush=True)


def _engine(processors: list[str]) -> Any:
    from vllm import LLM

    return LLM(
        str(find_smollm2()),
        dtype=default_dtype("cpu"),
        max_model_len=128,
        max_num_seqs=REQUESTS,
        enforce_eager=True,
        enable_prefix_caching=False,
        logits_processors=processors,
    )


class Seconds(NamedTuple):
    """The time of a batch. Other load on the machine does not count as CPU time."""

    wall: float
    processor: float


def _generate(engine: Any, goals: list[Any]) -> Seconds:
    """Generate one text per goal in one batch."""
    from vllm import SamplingParams

    prompts = [
        {"prompt_token_ids": [0, *range(100 + index, 112 + index)]} for index in range(REQUESTS)
    ]
    params = [
        SamplingParams(temperature=1.0, max_tokens=LENGTH, ignore_eos=True, seed=1, extra_args=goal)
        for goal in goals
    ]
    wall, processor = perf_counter(), process_time()
    answers = engine.generate(prompts, params, use_tqdm=False)
    assert sum(len(answer.outputs[0].token_ids) for answer in answers) == TOKENS
    return Seconds(perf_counter() - wall, process_time() - processor)


if __name__ == "__main__":
    main()
