"""What steering costs in vLLM: tokens a second, steered against bare, 64 requests at once, 8 goals.

Needs the environment with vLLM in it. SmolLM2 and the HMM of `examples/`; two engines in one
process, one of them without foretrace, by turns. With --quick, few turns.
"""

import os
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))


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
    given = options(__doc__)
    report = Report("Steered against bare vLLM, SmolLM2, 1,024 states")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        names = _attributes(folder / "attributes")
        settings = Settings(str(EXAMPLE), str(folder / "attributes"), str(folder / "tables"))
        os.environ.update(ENVIRONMENT | settings.to_environment())
        _compare(report, names, 2 if given.quick else 8)
    report.publish(given.json)


def _attributes(folder: Path) -> list[str]:
    """Write attributes that weigh a tenth of the tokens."""
    hmm = HMM.from_pretrained(EXAMPLE)
    names = [f"a{place}" for place in range(GOALS)]
    known = hmm.config.tokenizer_fingerprint
    for place, name in enumerate(names):
        write_random(folder, name, hmm.vocab_size, share=0.1, known=known, seed=place)
    return names


def _compare(report: Report, names: list[str], turns: int) -> None:
    processor = "foretrace.engines.vllm:SteeringProcessor"
    bare, steered = _engine([]), _engine([processor])
    goals = [{"goal": names[place % GOALS], "strength": 2.0} for place in range(REQUESTS)]
    none: list[dict[str, Any] | None] = [None] * REQUESTS
    _rate(bare, none)
    _rate(steered, goals)
    pairs = [(_rate(bare, none), _rate(steered, goals)) for _ in range(turns)]
    report.add("bare", median(rate for rate, _ in pairs), "tokens/s")
    report.add("steered", median(rate for _, rate in pairs), "tokens/s")
    ratios = [own / other for other, own in pairs]
    report.add("steered / bare, median of pairs", median(ratios), "", at_least=0.85)
    report.add("steered / bare, least", min(ratios), "")
    report.add("steered / bare, most", max(ratios), "")
    plain = [_rate(steered, none) / _rate(bare, none) for _ in range(turns)]
    report.add("plain requests beside foretrace / bare", median(plain), "")


def _engine(processors: list[str]) -> Any:
    from vllm import LLM

    return LLM(
        str(find_smollm2()),
        dtype="bfloat16",
        max_model_len=128,
        max_num_seqs=REQUESTS,
        enforce_eager=True,
        enable_prefix_caching=False,
        logits_processors=processors,
    )


def _rate(engine: Any, goals: list[Any]) -> float:
    """Write so many texts at once: tokens a second."""
    from vllm import SamplingParams

    prompts = [
        {"prompt_token_ids": [0, *range(100 + place, 112 + place)]} for place in range(REQUESTS)
    ]
    params = [
        SamplingParams(temperature=1.0, max_tokens=LENGTH, ignore_eos=True, seed=1, extra_args=goal)
        for goal in goals
    ]
    began = perf_counter()
    answers = engine.generate(prompts, params, use_tqdm=False)
    return sum(len(each.outputs[0].token_ids) for each in answers) / (perf_counter() - began)


if __name__ == "__main__":
    main()
