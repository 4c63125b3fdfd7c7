"""Measure where the HMM expects required text, and where token frequencies alone expect it.

The LM is SmolLM2-135M, as in the tests. --quick continues each prompt once.
"""

import sys
from math import exp
from pathlib import Path
from statistics import fmean

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import foretrace as ft
from foretrace.engines.transformers import stop_tokens, unigram_hmm
from foretrace.engines.transformers.calibration import Continuation, SteeredRuns
from harness import Report, options
from smollm2 import find_smollm2

ROOT = Path(__file__).parent.parent
LENGTH = 32
REQUIRED = (" lighthouse", " refund within 30 days")
PROMPTS = (
    "Yesterday morning we",
    "The other driver said",
    "In the small town",
    "My grandmother always",
    "After the storm",
    "The new teacher",
    "On the coast of",
    "When I was young",
)


def main() -> None:
    """Require each text with both HMMs."""
    args = options(__doc__)
    report = Report(f"required text in {LENGTH} tokens of SmolLM2-135M, top-p 0.9")
    folder = find_smollm2()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    hmm = ft.HMM.from_pretrained(ROOT / "examples" / "smollm2-135m")
    runs = SteeredRuns(
        lm,
        [tokenizer(prompt).input_ids for prompt in PROMPTS],
        ends=stop_tokens(lm.generation_config, hmm.config.eos_token_ids),
        copies=1 if args.quick else 8,
        max_new_tokens=LENGTH,
        top_p=0.9,
    )
    bare = nats_per_token(runs.draw(None))
    for text in REQUIRED:
        for name, one in (("HMM", hmm), ("frequencies", unigram_hmm(lm, tokenizer))):
            goal = ft.Compiler(one, exact=True).compile(ft.Goal(ft.contains(text, tokenizer)))
            rows = runs.draw(goal)
            late = [text not in tokenizer.decode(row.tokens[: LENGTH - 2]) for row in rows]
            label = f"{text!r}, {name}"
            report.add(f"{label}: price", fmean(row.price for row in rows), "nats per text")
            report.add(f"{label}: perplexity", exp(nats_per_token(rows) - bare), "bare = 1")
            report.add(f"{label}: ends in the last two tokens", 100 * fmean(late), "%")
    report.publish(args.json)


def nats_per_token(rows: list[Continuation]) -> float:
    """Return the mean negative log-probability of a token under the bare LM."""
    return sum(row.nats for row in rows) / sum(len(row.tokens) for row in rows)


if __name__ == "__main__":
    main()
