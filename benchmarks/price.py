"""Measure the price of steering: calibration on other prompts, and drift in long texts.

SmolLM2 is steered with the HMM and the attributes of `examples/`. The environment variable
FORETRACE_DATA names the folder of data with prompts for the calibration; without it, openings that
the LM writes take their place. Drift: bare texts are scored in retrospect, so that the price of
their first and last tokens can be compared; and steered texts are scored by the bare LM, by
position. --quick runs one attribute and shorter texts.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from math import exp
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import foretrace as ft
from foretrace._tabular import read_rows
from foretrace.attribute import tokenize
from foretrace.engines.prompts import start_ids
from foretrace.engines.transformers import calibration, encode_prompts
from foretrace.engines.transformers.sampler import Sampler
from foretrace.lookahead.levels import BUDGETS
from foretrace.vocabulary import tokenizer_settings
from harness import Report, options
from retrospect import retrospect, text_logits
from smollm2 import find_smollm2

EXAMPLES = Path(__file__).parent.parent / "examples"
NAMES = ("nontoxic", "positive", "negative", "political", "business")
END = [0]
BLOCK = 32  # tokens
COPIES = 2  # texts for each prompt
PROMPTS = 16  # prompts in a batch
BARE = "bare"
PAPER = "paper transform (20, -63), 3 tokens"
EVERY = "every occurrence counts"


def main() -> None:
    """Measure calibration, then drift."""
    args = options(__doc__)
    report = Report("The price of steering")
    source = find_smollm2()
    tokenizer = AutoTokenizer.from_pretrained(source)
    lm = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    hmm = ft.HMM.from_pretrained(EXAMPLES / "smollm2-135m")
    store = ft.AttributeStore(EXAMPLES / "attributes")
    prompts = held_out_prompts(tokenizer, lm, hmm, 16 if args.quick else 128)
    half = len(prompts) // 2
    runs = [
        calibration.SteeredRuns(lm, part, ends=END, max_new_tokens=8 if args.quick else 24)
        for part in (prompts[:half], prompts[half:])
    ]
    for name in NAMES[:1] if args.quick else NAMES:
        _calibrate(store[name], hmm, runs, {"medium": 0.06} if args.quick else None, report)
    count, length = (2, 64) if args.quick else (50, 256)
    product = None if args.quick else _product(tokenizer)
    _drift(lm, hmm, store["nontoxic"], product, prompts[:count], length, report)
    report.publish(args.json)


def held_out_prompts(tokenizer: Any, lm: Any, hmm: ft.HMM, count: int) -> list[list[int]]:
    """Return prompts of the data on which no attribute was calibrated, or openings of the LM."""
    if data := os.environ.get("FORETRACE_DATA"):
        rows = read_rows(Path(data) / "detox" / "train_prompts.jsonl.xz", ["prompt"])
        # The attributes of `examples/` were calibrated on the first ones.
        return encode_prompts(tokenizer, [row["prompt"] for row in rows[1000 : 1000 + count]])
    start = start_ids(tokenizer, hmm.config.eos_token_ids)
    return calibration.write_openings(lm, start, ends=END, count=count)


def _product(tokenizer: Any) -> ft.Attribute | None:
    """Fit the product of token weights that the paper's transform suits; None without data."""
    if not (data := os.environ.get("FORETRACE_DATA")):
        return None
    rows = read_rows(Path(data) / "detox" / "train.jsonl.xz", ["text", "toxicity"])
    windows = tokenize([row["text"] for row in rows], tokenizer, 128)
    scores = [1 - rows[text]["toxicity"] for text in windows.texts]
    config = ft.FitConfig(objective="cross-entropy", transform=ft.LogitAffine(10.0, -10.0))
    settings = tokenizer_settings(tokenizer.get_vocab())
    return ft.Attribute.fit(
        windows.token_ids, scores, config=config, groups=windows.texts, **settings
    )


def _calibrate(
    attribute: ft.Attribute,
    hmm: ft.HMM,
    runs: Sequence[calibration.SteeredRuns],
    budgets: dict[str, float] | None,
    report: Report,
) -> None:
    """Calibrate on half of the prompts, and measure the price on the other half."""
    began = perf_counter()
    levels = calibration.calibrate(runs[0], hmm, attribute, budgets or BUDGETS)
    seconds = perf_counter() - began
    report.add(f"{attribute.name}: calibration", seconds, "s", at_most=120)
    compiler = ft.Compiler(hmm, runs[1].max_new_tokens)
    for name, level in levels.items():
        goal = compiler.compile(ft.Goal(attribute, level.strength))
        reached = runs[1].price(goal) / level.budget
        error = abs(reached - 1)
        report.add(f"{attribute.name}, {name}: price on other prompts / asked", reached, "")
        report.add(f"{attribute.name}, {name}: error of the price", error, "", at_most=0.15)


def _drift(
    lm: Any,
    hmm: ft.HMM,
    attribute: ft.Attribute,
    product: ft.Attribute | None,
    prompts: Sequence[Sequence[int]],
    length: int,
    report: Report,
) -> None:
    """Compare the first and the last tokens of long texts."""
    medium, compiler = ft.Goal(attribute), ft.Compiler(hmm, length)
    goals = {"medium": compiler.compile(medium)}
    if product is not None:
        transform = ft.LogitAffine(20.0, -63.0)
        goals[PAPER] = ft.Compiler(hmm, 3).compile(ft.Goal(product, transform=transform))
    torch.manual_seed(0)
    drawn = {BARE: _draw(lm, prompts, length), f"{BARE}, drawn again": _draw(lm, prompts, length)}
    every = compiler.compile(replace(medium, attribute=_every_occurrence(attribute)))
    _drift_of_prices(lm, prompts, drawn[BARE], goals | {f"medium, {EVERY}": every}, report)
    drawn |= {name: _draw(lm, prompts, length, goal) for name, goal in goals.items()}
    nats = {name: _nats_by_block(lm, prompts, rows) for name, rows in drawn.items()}
    for name, rows in drawn.items():
        report.add(f"{name}: 4-grams that occurred before in the text", _repetition(rows), "")
        if name == BARE:
            continue
        ratios = [exp(one - bare) for one, bare in zip(nats[name], nats[BARE], strict=True)]
        worst = max(abs(ratio - 1) for ratio in ratios)
        limit = 0.1 if name == "medium" else None
        report.add(f"{name}: perplexity of the last {BLOCK} tokens / bare", ratios[-1], "")
        report.add(f"{name}: largest change of a block's perplexity", worst, "", at_most=limit)


def _drift_of_prices(
    lm: Any,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[list[int]]],
    goals: dict[str, ft.CompiledGoal],
    report: Report,
) -> None:
    """Compare the price of the first and the last tokens of bare texts, in retrospect.

    The entropy of the LM shows how much there is to steer.
    """
    first_texts = [rows[0] for rows in texts]
    scored = [
        retrospect(lm, list(goals.values()), prompt, text, END)
        for prompt, text in zip(prompts, first_texts, strict=True)
    ]
    entropies = [
        _entropy(text_logits(lm, prompt, text))
        for prompt, text in zip(prompts, first_texts, strict=True)
    ]
    columns = {name: [rows[:, i] for rows in scored] for i, name in enumerate(goals)}
    for name, rows in ({"entropy of the LM": entropies} | columns).items():
        first, last = (fmean(_by_block(row)[i] for row in rows) for i in (0, -1))
        limit = 0.2 if name == "medium" else None
        report.add(f"{name}: tokens 1-{BLOCK} of bare texts", first, "nats")
        report.add(f"{name}: the last {BLOCK}", last, "nats")
        report.add(f"{name}: change", abs(last / first - 1), "", at_most=limit)


def _entropy(logits: Tensor) -> Tensor:
    log_probabilities = logits.log_softmax(-1)
    return -(log_probabilities.exp() * log_probabilities).sum(-1)


def _every_occurrence(attribute: ft.Attribute) -> ft.Attribute:
    """Return an attribute whose rewards count at every occurrence of a token."""
    evidence = tuple(replace(one, first_only=False) for one in attribute.evidence)
    return replace(attribute, evidence=evidence)


def _draw(
    lm: Any, prompts: Sequence[Sequence[int]], length: int, goal: ft.CompiledGoal | None = None
) -> list[list[list[int]]]:
    """Draw COPIES texts for each prompt."""
    sampler = Sampler(lm, ends=[], max_new_tokens=length, top_p=0.9)
    drawn: list[list[list[int]]] = []
    for start in range(0, len(prompts), PROMPTS):
        rows = sampler.draw(prompts[start : start + PROMPTS], COPIES, goal)
        drawn += [[text.tokens for text in row] for row in rows]
    return drawn


def _by_block(values: Tensor) -> list[float]:
    """Return the mean of every block of tokens."""
    return [float(block.mean()) for block in torch.split(values, BLOCK)]


def _repetition(drawn: Sequence[Sequence[list[int]]], n: int = 4) -> float:
    """Return the share of n-grams of tokens that occurred before in the same text."""
    texts = [text for rows in drawn for text in rows]
    ngrams = [[tuple(text[i : i + n]) for i in range(len(text) - n + 1)] for text in texts]
    return 1 - sum(len(set(row)) for row in ngrams) / sum(map(len, ngrams))


def _nats_by_block(
    lm: Any, prompts: Sequence[Sequence[int]], drawn: Sequence[Sequence[list[int]]]
) -> list[float]:
    """Return the mean negative log-likelihood of the tokens of each block."""
    blocks = [
        _by_block(-text_logits(lm, prompt, text).log_softmax(-1)[torch.arange(len(text)), text])
        for prompt, rows in zip(prompts, drawn, strict=True)
        for text in rows
    ]
    return [fmean(column) for column in zip(*blocks, strict=True)]


if __name__ == "__main__":
    main()
