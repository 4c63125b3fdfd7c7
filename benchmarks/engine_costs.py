"""Measure the cost of steering one text in every engine that is installed.

Each engine generates a text of SmolLM2, steered and bare, in turns, all engines within one run. The
figures are tokens per second, which include the prompt of 12 tokens, the ratio of the times, and
the part of it that is spent in foretrace. llama.cpp runs the GGUF file with 4-bit weights, the
others run the same weights in float32. All engines use as many threads as torch does.
"""

import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch

from foretrace import HMM, AttributeStore, CompiledGoal, Compiler, Goal
from harness import Report, options
from smollm2 import find_gguf, find_smollm2

EXAMPLES = Path(__file__).parent.parent / "examples"
PROMPT = [504, 550, 9375, 1640, 338, 392, 436, 411, 260, 3855, 282, 260]  # 12 tokens
GOALS = {"llama.cpp": 1.15}  # at most so much time, relative to bare


class Run(NamedTuple):
    """The seconds of a text, and those that were spent in foretrace, where they are measured."""

    total: float
    inside: float = 0.0


Engine = Callable[[bool], Run]
"""Generates a text, steered or not."""


class Timed:
    """A function that measures its own time."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.seconds = function, 0.0

    def __call__(self, *arguments: Any) -> Any:
        """Call the function, and add its time."""
        start = perf_counter()
        result = self.function(*arguments)
        self.seconds += perf_counter() - start
        return result


def main() -> None:
    """Run the benchmark."""
    arguments = options(__doc__)
    new, pairs = (16, 3) if arguments.quick else (64, 10)
    hmm = HMM.from_pretrained(EXAMPLES / "smollm2-135m")
    attribute = AttributeStore(EXAMPLES / "attributes")["nontoxic"]
    goal = Compiler(hmm).compile(Goal(attribute, level="strong"))
    engines = dict(installed(goal, new))
    runs: dict[str, list[tuple[Run, Run]]] = {name: [] for name in engines}
    for turn in range(pairs + 1):
        print(f"turn {turn} of {pairs}", file=sys.stderr, flush=True)
        for name, engine in engines.items():
            results = {steered: engine(steered) for steered in (turn % 2 == 0, turn % 2 == 1)}
            if turn:  # the first turn is a warm-up
                runs[name].append((results[False], results[True]))
    report = Report("One text: steered / bare, by engine")
    for name, pairs_of_runs in runs.items():
        _add_rows(report, name, pairs_of_runs, new)
    report.publish(arguments.json)


def installed(goal: CompiledGoal, new: int) -> Iterator[tuple[str, Engine]]:
    """Yield the engines that are installed, by name."""
    if find_spec("transformers"):
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(find_smollm2(), dtype=torch.float32)
        yield "transformers generate", transformers_generate(model, goal, new)
    if find_spec("llama_cpp"):
        yield "llama.cpp", llama_cpp(goal, new)
    if find_spec("mlx_lm"):
        yield "MLX-LM", mlx_lm(goal, new)


def transformers_generate(model: Any, goal: CompiledGoal, new: int) -> Engine:
    """Generate with `model.generate`."""
    from transformers import LogitsProcessorList

    from foretrace.engines.transformers import SteeringProcessor

    ids = torch.tensor([PROMPT])
    mask = torch.ones_like(ids)

    def run(steered: bool) -> Run:
        processor = Timed(SteeringProcessor(goal, prompt_mask=mask, max_new_tokens=new))
        start = perf_counter()
        model.generate(
            ids,
            attention_mask=mask,
            logits_processor=LogitsProcessorList([processor] if steered else []),
            do_sample=True,
            top_k=0,
            min_new_tokens=new,
            max_new_tokens=new,
            pad_token_id=0,
        )
        return Run(perf_counter() - start, processor.seconds)

    return run


def llama_cpp(goal: CompiledGoal, new: int) -> Engine:
    """Generate with `Llama.generate`."""
    from llama_cpp import LogitsProcessorList

    from foretrace.engines.llama_cpp import SteeringProcessor
    from foretrace.gguf import load_llama

    threads = torch.get_num_threads()
    llm = load_llama(str(find_gguf()), n_ctx=256, n_threads=threads, n_threads_batch=threads)

    def run(steered: bool) -> Run:
        processor = Timed(SteeringProcessor(llm, goal, max_new_tokens=new))
        processors = LogitsProcessorList([processor]) if steered else None
        llm.reset()  # else it would reuse the prompt of the text before
        start = perf_counter()
        tokens = llm.generate(
            PROMPT, top_k=0, top_p=1.0, min_p=0.0, temp=1.0, logits_processor=processors
        )
        _take(tokens, new)
        return Run(perf_counter() - start, processor.seconds)

    return run


def mlx_lm(goal: CompiledGoal, new: int) -> Engine:
    """Generate with `generate_step`."""
    import mlx.core as mx
    from mlx_lm import load
    from mlx_lm.generate import generate_step
    from mlx_lm.sample_utils import make_sampler

    from foretrace.engines.mlx import logits_processor

    model, *_ = load(str(find_smollm2()))
    model.set_dtype(mx.float32)
    sampler = make_sampler(temp=1.0)

    def run(steered: bool) -> Run:
        processor = logits_processor(goal, max_new_tokens=new)
        start = perf_counter()
        steps = generate_step(
            mx.array(PROMPT),
            model,
            max_tokens=new,
            sampler=sampler,
            logits_processors=[processor] if steered else None,
        )
        _take(steps, new)
        return Run(perf_counter() - start)

    return run


def _take(tokens: Iterator[Any], count: int) -> None:
    for _, _ in zip(range(count), tokens, strict=False):
        pass


def _add_rows(report: Report, name: str, runs: list[tuple[Run, Run]], new: int) -> None:
    bare = median(one.total for one, _ in runs)
    ratio = median(steered.total / one.total for one, steered in runs)
    inside = median(steered.inside for _, steered in runs)
    report.add(f"{name}: bare", new / bare, "tokens/s")
    report.add(f"{name}: steered", new / bare / ratio, "tokens/s")
    report.add(f"{name}: steered / bare, time", ratio, "", at_most=GOALS.get(name))
    if inside:
        report.add(f"{name}: in foretrace", 1e3 * inside / new, "ms/token")
        report.add(f"{name}: in foretrace / bare", inside / bare, "")


if __name__ == "__main__":
    main()
