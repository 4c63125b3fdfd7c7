"""Measure where required words come in texts, and how natural they are there.

Each of five words is required in 40 tokens after 100 prompts, with an HMM: brought forward,
exactly, and at the end of bare texts. Perplexity is under the bare LM: of the whole text, and of
the generated part of the sentence that holds the word. The LM is SmolLM2-135M. The environment
variable FORETRACE_DATA names the folder of data with the prompts, and without it, the prompts are
openings that the LM writes. --quick continues eight prompts.
"""

import os
import re
from collections.abc import Sequence
from math import exp
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from transformers import AutoModelForCausalLM, AutoTokenizer

import foretrace as ft
from foretrace._hardware import default_dtype
from foretrace._tabular import read_rows
from foretrace.engines.prompts import encode_prompts, start_ids
from foretrace.engines.transformers.calibration import SteeredRuns, write_openings
from foretrace.evaluate.perplexity import token_nll
from harness import Report, options
from price import END, EXAMPLES
from smollm2 import find_smollm2

WORDS = ("lighthouse", "refund", "marmalade", "bicycle", "thunderstorm")
LENGTH, LAST = 40, 2
SENTENCE = re.compile(r"[^.!?\n]*[.!?\n]*")


class Placed(NamedTuple):
    """A text, and where its word is."""

    tokens: Sequence[int]
    word: str
    first: int
    """The first token of the sentence that holds the word."""
    stop: int
    """The token after that sentence."""
    is_last: bool
    """Whether the word ends in the last two tokens that the text may have."""


def main() -> None:
    """Require each word after all prompts, in several ways."""
    args = options(__doc__)
    report = Report(f"required words in {LENGTH} tokens of SmolLM2-135M, top-p 0.9")
    source = find_smollm2()
    tokenizer = AutoTokenizer.from_pretrained(source)
    lm = AutoModelForCausalLM.from_pretrained(source, dtype=default_dtype("cpu")).eval()
    hmm = ft.HMM.from_pretrained(EXAMPLES / "smollm2-135m")
    prompts = read_prompts(tokenizer, lm, hmm, 8 if args.quick else 100)
    runs = SteeredRuns(lm, prompts, ends=END, copies=1, max_new_tokens=LENGTH, top_p=0.9)
    bare = [row.tokens for row in runs.draw(None)]
    losses = [loss for row in token_losses(lm, prompts, bare) for loss in row]
    report.add("bare: perplexity of the text", exp(fmean(losses)), "")
    at_end = [[force(tokenizer, row, word) for row in bare] for word in WORDS]
    measure(report, "forced at the end", lm, tokenizer, prompts, at_end)
    for name, exact in (("brought forward", False), ("exact", True)):
        compiler = ft.Compiler(hmm, exact=exact)
        steered = [
            [row.tokens for row in runs.draw(compiler.compile(ft.Goal(goal)))]
            for goal in (ft.contains(word, tokenizer) for word in WORDS)
        ]
        measure(report, name, lm, tokenizer, prompts, steered)
    report.publish(args.json)


def read_prompts(tokenizer: Any, lm: Any, hmm: ft.HMM, count: int) -> list[list[int]]:
    """Return beginnings of sentences, or openings of the LM if there are no data."""
    if data := os.environ.get("FORETRACE_DATA"):
        rows = read_rows(Path(data) / "sentiment" / "prompts.jsonl.xz", ["prompt"])
        return encode_prompts(tokenizer, [row["prompt"] for row in rows[:count]])
    start = start_ids(tokenizer, hmm.config.eos_token_ids)
    return write_openings(lm, start, ends=END, count=count)


def force(tokenizer: Any, tokens: Sequence[int], word: str) -> list[int]:
    """Return a bare text that ends in the word, after at most LENGTH tokens."""
    added = tokenizer(f" {word}").input_ids
    return [*[token for token in tokens if token not in END][: LENGTH - len(added)], *added]


def measure(
    report: Report,
    name: str,
    lm: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[Sequence[int]]],
) -> None:
    """Report coverage, placement and perplexity of the texts of each word."""
    placed, all_nats, sentence_nats = [], [], []
    for word, rows in zip(WORDS, texts, strict=True):
        for row, losses in zip(rows, token_losses(lm, prompts, rows), strict=True):
            one = place(tokenizer, row, word)
            all_nats += losses
            if one is not None:
                placed.append(one)
                sentence_nats += losses[one.first : one.stop]
    total = sum(map(len, texts))
    report.add(f"{name}: texts with the word", 100 * len(placed) / total, "%", at_least=100)
    late = 100 * fmean(one.is_last for one in placed)
    report.add(f"{name}: word in the last {LAST} tokens", late, "%")
    report.add(f"{name}: perplexity of the sentence", exp(fmean(sentence_nats)), "")
    report.add(f"{name}: perplexity of the text", exp(fmean(all_nats)), "")


def place(tokenizer: Any, tokens: Sequence[int], word: str) -> Placed | None:
    """Find the word in a text, and the sentence around it; None if there is no such word."""
    ends = [len(tokenizer.decode(tokens[: count + 1])) for count in range(len(tokens))]
    text = tokenizer.decode(tokens)
    begin = text.find(word)
    if begin < 0:
        return None
    sentence = next(one for one in SENTENCE.finditer(text) if one.start() <= begin < one.end())
    first = sum(end <= sentence.start() for end in ends)
    stop = 1 + sum(end < sentence.end() for end in ends)
    last = sum(end < begin + len(word) for end in ends)  # the token that ends the word
    return Placed(tokens, word, first, stop, last >= LENGTH - LAST)


def token_losses(
    lm: Any, prompts: Sequence[Any], texts: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Return the negative log-probability of every token of texts under the bare LM."""
    encode: Any = list  # they are token ids already
    rows: list[Any] = [[text] for text in texts]
    return [losses for (losses,) in token_nll(lm, encode, prompts, rows)]


if __name__ == "__main__":
    main()
