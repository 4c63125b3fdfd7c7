"""Measure the error of steering with a sparse emission, against the dense one, on 200 prompts.

Set FORETRACE_DATA to a folder with `detox` (JSON Lines, compressed with xz), and FORETRACE_HMM to a
dense HMM of SmolLM2 from `foretrace distill`. Without FORETRACE_HMM, the HMM of `examples/` is
converted to a dense one.
"""

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from foretrace import HMM, Attribute, FitConfig
from foretrace._tabular import read_rows
from foretrace.attribute import LogitAffine, tokenize
from foretrace.engines.prefix_tracker import PrefixTracker
from foretrace.steering import Compiler, Goal, Request
from harness import Report, options
from smollm2 import find_smollm2

EXAMPLE = Path(__file__).parent.parent / "examples" / "smollm2-135m"
PROMPTS, REMAINING = 200, 20
TRANSFORMS = ((1.0, 0.0), (10.0, -10.0))  # scale and shift
TOLERANCES = (1e-4, 1e-3, 1e-2)


def main() -> None:
    """Compare the steered next-token distributions of both."""
    arguments = options(__doc__)
    data = Path(os.environ["FORETRACE_DATA"]) / "detox"
    report = Report("Steered next-token distributions after real prompts: sparse against dense")
    tokenizer: Any = AutoTokenizer.from_pretrained(find_smollm2())
    lm = AutoModelForCausalLM.from_pretrained(find_smollm2(), dtype=torch.float32)
    rows = read_rows(data / "test_prompts_nontoxic.jsonl.xz")[
        : PROMPTS // 4 if arguments.quick else PROMPTS
    ]
    prompts = [tokenizer(row["prompt"]).input_ids for row in rows]
    dense = _dense_hmm()
    attribute = _nontoxic(data, tokenizer, dense.vocab_size)
    logits = _logits(lm, prompts)
    unsteered = logits.double().softmax(-1)
    exact = {
        transform: _steered(dense, attribute, transform, prompts, logits)
        for transform in TRANSFORMS
    }
    for transform, steered in exact.items():
        mean, _ = _total_variation(unsteered, steered)
        report.add(f"{_label(transform)}: from bare, mean", mean, "TV")
    for tolerance in TOLERANCES[1:2] if arguments.quick else TOLERANCES:
        sparse = dense.sparsify(tolerance)
        name = f"tolerance {tolerance:g}"
        report.add(f"{name}: size", sparse.nbytes / dense.nbytes, "of dense")
        for transform, steered in exact.items():
            approximate = _steered(sparse, attribute, transform, prompts, logits)
            mean, most = _total_variation(steered, approximate)
            label = f"{name}, {_label(transform)}"
            report.add(f"{label}: mean", mean, "TV")
            report.add(f"{label}: most", most, "TV", at_most=(tolerance / 2) ** 0.5)
    report.publish(arguments.json)


def _dense_hmm() -> HMM:
    hmm = HMM.from_pretrained(os.environ.get("FORETRACE_HMM", EXAMPLE))
    table = hmm.emission.of_tokens(torch.arange(hmm.vocab_size)).float()
    return HMM(hmm.initial, hmm.transition, table / table.sum(0), hmm.config)


def _nontoxic(data: Path, tokenizer: Any, vocab_size: int) -> Attribute:
    rows = read_rows(data / "train.jsonl.xz")
    windows = tokenize([row["text"] for row in rows], tokenizer)
    scores = [1 - rows[text]["toxicity"] for text in windows.texts]
    return Attribute.fit(
        windows.token_ids,
        scores,
        vocab_size=vocab_size,
        groups=windows.texts,
        config=FitConfig(objective="cross-entropy"),  # the transforms need a probability
    )


@torch.inference_mode()
def _logits(lm: Any, prompts: list[list[int]]) -> Tensor:
    return torch.cat([lm(torch.tensor([ids]), logits_to_keep=1).logits[:, -1] for ids in prompts])


def _steered(
    hmm: HMM,
    attribute: Attribute,
    transform: tuple[float, float],
    prompts: list[list[int]],
    logits: Tensor,
) -> Tensor:
    goal = Goal(attribute, 1.0, transform=LogitAffine(*transform), neutral_end=False)
    compiled, tracker = Compiler(hmm).compile(goal), PrefixTracker(hmm)
    requests = [Request(compiled, tuple(ids), REMAINING + 1) for ids in prompts]
    tracker.step(requests, [[] for _ in prompts])
    steered = logits.clone()
    tracker.reweight_(steered)
    return steered.double().softmax(-1)


def _total_variation(one: Tensor, other: Tensor) -> tuple[float, float]:
    """Compute the mean and the maximum of the total variation."""
    distance = (one - other).abs().sum(-1) / 2
    return float(distance.mean()), float(distance.max())


def _label(transform: tuple[float, float]) -> str:
    return "scale {:g}, shift {:g}".format(*transform)


if __name__ == "__main__":
    main()
