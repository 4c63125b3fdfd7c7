"""Throughput of vLLM with and without steering: 64 concurrent requests, 8 goals.

Needs an environment with vLLM. Runs SmolLM2 with the HMM of `examples/` in two engines of one
process, one of them without foretrace, in turns. With --quick there are fewer turns.
"""

import os
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))


from foretrace._hardware import default_dtype
from foretrace.engines.vllm.settings import Settings
from foretrace.hmm import HMM
from harness import Report, options
from random_attributes import write_random
from smollm2 import find_smollm2

EXAMPLE = Path(__file__).parent.parent / "examples" / "smollm2-135m"
REQUESTS, LENGTH, GOALS = 64, 32, 8
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
        names = _attributes(folder / "attributes")
        settings = Settings(str(EXAMPLE), str(folder / "attributes"), str(folder / "tables"))
        os.environ.update(ENVIRONMENT | settings.to_environment())
        _compare(report, names, 2 if arguments.quick else 8)
    report.publish(arguments.json)


def _attributes(folder: Path) -> list[str]:
    """Write attributes with a weight below 1 for a tenth of the tokens; return their names."""
    hmm = HMM.from_pretrained(EXAMPLE)
    names = [f"a{index}" for index in range(GOALS)]
    fingerprint = hmm.config.tokenizer_fingerprint
    for seed, name in enumerate(names):
        write_random(folder, name, hmm.vocab_size, share=0.1, known=fingerprint, seed=seed)
    return names


def _compare(report: Report, names: list[str], turns: int) -> None:
    processor = "foretrace.engines.vllm:SteeringProcessor"
    bare, steered = _engine([]), _engine([processor])
    goals = [{"goal": names[index % GOALS], "strength": 2.0} for index in range(REQUESTS)]
    plain: list[dict[str, Any] | None] = [None] * REQUESTS
    _throughput(bare, plain)
    _throughput(steered, goals)
    pairs = [(_throughput(bare, plain), _throughput(steered, goals)) for _ in range(turns)]
    report.add("bare", median(rate for rate, _ in pairs), "tokens/s")
    report.add("steered", median(rate for _, rate in pairs), "tokens/s")
    ratios = [with_goals / without for without, with_goals in pairs]
    report.add("steered / bare, median of pairs", median(ratios), "", at_least=0.85)
    report.add("steered / bare, minimum", min(ratios), "")
    report.add("steered / bare, maximum", max(ratios), "")
    ratios = [_throughput(steered, plain) / _throughput(bare, plain) for _ in range(turns)]
    report.add("plain requests with foretrace loaded / bare", median(ratios), "")


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


def _throughput(engine: Any, goals: list[Any]) -> float:
    """Generate one text per goal in one batch; return tokens per second."""
    from vllm import SamplingParams

    prompts = [
        {"prompt_token_ids": [0, *range(100 + index, 112 + index)]} for index in range(REQUESTS)
    ]
    params = [
        SamplingParams(temperature=1.0, max_tokens=LENGTH, ignore_eos=True, seed=1, extra_args=goal)
        for goal in goals
    ]
    start = perf_counter()
    answers = engine.generate(prompts, params, use_tqdm=False)
    return sum(len(answer.outputs[0].token_ids) for answer in answers) / (perf_counter() - start)


if __name__ == "__main__":
    main()
