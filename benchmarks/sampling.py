"""Sampling speed: foretrace against the bare engine, on the same prompts, in alternation.

Needs SmolLM2 (see CONTRIBUTING.md). vLLM is measured where it is installed.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from foretrace.distill.em.measures import text_mask
from foretrace.distill.sampling.transformers_source import TransformersSource
from foretrace.distill.sampling.vllm_source import VLLMSource
from harness import Options, Report, options
from smollm2 import find_smollm2

END = "<|endoftext|>"


def main() -> None:
    """Measure the engines that are installed."""
    arguments = options(__doc__)
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    model = str(find_smollm2())
    report = Report("Sampling: tokens/s, foretrace / bare engine")
    measure_transformers(model, arguments, report)
    if _installed("vllm"):
        measure_vllm(model, arguments, report)
    report.publish(arguments.json)


def measure_transformers(model: str, arguments: Options, report: Report) -> None:
    """Compare sampling without prompts with `generate` on a batch of the same size."""
    rows, length = (64, 9) if arguments.quick else (256, 33)
    source = TransformersSource.load(model, end_of_text_token=END)
    source.batch_size = rows
    input_ids = torch.zeros(rows, 1, dtype=torch.long)

    def bare() -> int:
        generate = source.model.generate
        samples = generate(  # type: ignore[operator]
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=True,
            top_k=0,
            max_new_tokens=length - 1,
            eos_token_id=0,
            pad_token_id=0,
        )
        return int(text_mask(samples[:, 1:], 0).sum())

    def ours() -> int:
        return int(text_mask(source.draw([[]] * rows, length - 1, seed=0), 0).sum())

    _compare("transformers", bare, ours, arguments, report, goal=0.9)


def measure_vllm(model: str, arguments: Options, report: Report) -> None:
    """Compare sampling, with and without prompts, with `LLM.generate` without seeds."""
    from vllm import SamplingParams

    rows, length = (128, 12) if arguments.quick else (1024, 32)
    source = VLLMSource.load(
        model,
        end_of_text_token=END,
        max_model_len=64,
        max_num_seqs=512,
        enforce_eager=True,
    )
    prompt = source.encode(["We had one farmer tell us that"])[0]
    prefixes = [[] if row % 2 else prompt for row in range(rows)]
    prompts = [{"prompt_token_ids": [0, *prefix]} for prefix in prefixes]

    def bare() -> int:
        settings = [
            SamplingParams(
                max_tokens=length - len(prefix),
                top_k=0,
                stop_token_ids=[0],
                ignore_eos=True,
                detokenize=False,
            )
            for prefix in prefixes
        ]
        outputs = source.engine.generate(prompts, settings, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    def ours() -> int:
        samples = source.draw(prefixes, length, seed=0)
        return int(text_mask(samples, 0).sum()) - sum(map(len, prefixes))

    _compare("vLLM", bare, ours, arguments, report, goal=0.95)


def _compare(
    name: str,
    bare: Callable[[], int],
    ours: Callable[[], int],
    arguments: Options,
    report: Report,
    *,
    goal: float,
) -> None:
    """Alternate between the two, and report the best of each, since noise only slows them."""
    rates: dict[str, list[float]] = {"bare": [], "ours": []}
    for turn in range(2 if arguments.quick else 4):
        for which, draw in (("bare", bare), ("ours", ours)):
            started = perf_counter()
            tokens = draw()
            if turn:  # the first turn is a warm-up
                rates[which].append(tokens / (perf_counter() - started))
    best = {which: max(values) for which, values in rates.items()}
    report.add(f"{name}, bare", best["bare"], "tokens/s")
    report.add(f"{name}, foretrace", best["ours"], "tokens/s")
    report.add(f"{name}, ratio", best["ours"] / best["bare"], "", at_least=goal)


def _installed(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None


if __name__ == "__main__":
    main()
