"""Measure constraints: texts that must or must not occur, their cost and the perplexity.

SmolLM2 is steered with the HMM of `examples/`. The cost is that of an automaton of 20 states, alone
and combined with an attribute. The success is that of 100 continuations with one text that must
occur and two that must not. --quick runs fewer.
"""

import sys
from functools import partial
from math import exp
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessorList

import foretrace as ft
from decode import EXAMPLE, HORIZON, PROMPT, Timed, compile_goal, random_attribute
from foretrace.evaluate.continuations import encode_with_bos
from foretrace.evaluate.perplexity import token_nll
from harness import Report, options, paired
from smollm2 import find_smollm2

BEGINNINGS = Path(__file__).parent.parent / "tests" / "engines" / "beginnings.txt"
TWENTY = "policy on refunding"  # 19 letters: an automaton of 20 states
MUST, MUST_NOT, NEW = "refund", [" sorry", "Sorry"], 30


def main() -> None:
    """Measure the cost, then the success and the perplexity."""
    args = options(__doc__)
    report = Report("Texts that must occur, or must not")
    source = find_smollm2()
    tokenizer = AutoTokenizer.from_pretrained(source)
    lm = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    hmm = ft.HMM.from_pretrained(EXAMPLE)
    for batch in (1,) if args.quick else (1, 8, 32):
        _cost(lm, tokenizer, hmm, batch, 2 if args.quick else 8, report)
    _success(lm, tokenizer, hmm, 5 if args.quick else 100, report)
    report.publish(args.json)


def _cost(lm: Any, tokenizer: Any, hmm: ft.HMM, batch: int, pairs: int, report: Report) -> None:
    """Compare generation without steering, with an attribute, with an automaton, and with both."""
    new = 12
    ids = torch.randint(3, hmm.vocab_size, (batch, PROMPT))
    mask = torch.ones_like(ids)
    attribute = random_attribute(hmm)
    must = ft.contains(TWENTY, tokenizer)
    assert must.terms.num_states == len(TWENTY) + 1
    goals = {
        "steered": compile_goal(hmm, attribute),
        "automaton": compile_goal(hmm, must, 1.0),
        "both": compile_goal(hmm, attribute & must),
    }

    def generate(goal: ft.CompiledGoal | None) -> list[float]:
        processor = Timed(goal, prompt_mask=mask, max_new_tokens=64)
        settings = {"do_sample": True, "top_k": 0, "top_p": 0.9, "pad_token_id": 0}
        settings |= {"min_new_tokens": new, "max_new_tokens": new}
        processors = LogitsProcessorList([processor])
        lm.generate(ids, attention_mask=mask, logits_processor=processors, **settings)
        return processor.seconds

    ratios = {}
    for name, goal in goals.items():
        bare, ratios[name] = paired(partial(generate, None), partial(generate, goal), pairs)
        inside = median(sum(generate(goal)) for _ in range(3)) / bare
        report.add(f"batch {batch}, {name}: against bare", ratios[name], "")
        report.add(f"batch {batch}, {name}: inside the processor, against bare", inside, "")
    added = ratios["both"] - ratios["steered"]
    states = must.terms.num_states
    report.add(f"batch {batch}: added by {states} states", added, "", at_most=0.10)


def _success(lm: Any, tokenizer: Any, hmm: ft.HMM, count: int, report: Report) -> None:
    """Continue prompts without steering and under constraints."""
    constraint = ft.contains(MUST, tokenizer) & ~ft.contains(MUST_NOT, tokenizer)
    compiler = ft.Compiler(hmm, HORIZON, exact=True)
    prompts = BEGINNINGS.read_text("utf-8").splitlines()[:count]
    for name, scale in (("bare", None), ("steered", 1.0), ("scale 1.5", 1.5)):
        torch.manual_seed(0)
        goal = None
        if scale is not None:
            goal = compiler.compile(ft.Goal(constraint, transform=ft.LogitAffine(scale)))
        texts: list[str] = []
        for first in range(0, count, 20):
            batch = prompts[first : first + 20]
            texts += ft.generate(lm, tokenizer, batch, goal=goal, max_new_tokens=NEW, top_p=0.9)
        met = [MUST in text and not any(word in text for word in MUST_NOT) for text in texts]
        target = None if scale is None else 1.0
        report.add(f"{name}: share that keeps to it", fmean(met), "", at_least=target)
        encode = partial(encode_with_bos, tokenizer, bos_token_id=0)
        nats = token_nll(lm, encode, prompts, [[text] for text in texts])
        perplexities = [exp(fmean(row[0])) for row in nats if row[0]]
        report.add(f"{name}: perplexity", fmean(perplexities), "")
        if scale is not None:
            position = fmean(text.index(MUST) / len(text) for text in texts)
            report.add(f"{name}: where it occurs (0 first, 1 last)", position, "")


if __name__ == "__main__":
    main()
