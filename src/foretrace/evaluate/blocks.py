"""Metrics of every block of tokens of a text.

A block of texts is a list for each prompt with the part of each continuation that is in the block;
it is empty where the continuation has ended before.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import exp
from typing import TYPE_CHECKING, Any

import numpy as np

from foretrace.evaluate import metrics
from foretrace.evaluate.metrics import Interval, Measurement

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BLOCK = 64  # tokens
LOSS = "perplexity"  # its measurement is the loss, in nats per token
Texts = Sequence[Sequence[str]]
"""A list for each prompt with its continuations, or their parts in a block."""


def has_blocks(max_new_tokens: int, tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Return whether texts have more than one block, and the tokenizer can find them."""
    return max_new_tokens > BLOCK and tokenizer.is_fast


def block_starts(max_new_tokens: int) -> range:
    """Return the position of the first token of every block."""
    return range(0, max_new_tokens, BLOCK)


def split_texts(
    tokenizer: "PreTrainedTokenizerBase", texts: Texts, max_new_tokens: int
) -> list[list[list[str]]]:
    """Cut texts into blocks of tokens."""
    starts = block_starts(max_new_tokens)
    parts = [[_split(tokenizer, text, starts) for text in row] for row in texts]
    return [[[part[block] for part in row] for row in parts] for block in range(len(starts))]


def _split(tokenizer: "PreTrainedTokenizerBase", text: str, starts: range) -> list[str]:
    """Cut a text at the first character of the token with which a block begins."""
    settings = {"add_special_tokens": False, "return_offsets_mapping": True}
    offsets = tokenizer(text, **settings).offset_mapping
    cuts = [offsets[start][0] if start < len(offsets) else len(text) for start in starts[1:]]
    return [text[begin:end] for begin, end in pairwise([0, *cuts, len(text)])]


def split_losses(
    nats: Sequence[Sequence[Sequence[float]]], max_new_tokens: int
) -> list[Measurement]:
    """Compute the mean loss of a token in every block, from the losses of all tokens, in nats.

    A text that is encoded again can have more tokens than were generated: they are in the last
    block.
    """
    blocks = []
    for begin, end in pairwise([*block_starts(max_new_tokens), None]):
        parts = [[text[begin:end] for text in row] for row in nats]
        totals = [sum(map(sum, row)) for row in parts]
        counts = [sum(map(len, row)) for row in parts]
        blocks.append(Measurement(np.asarray(totals, float), np.asarray(counts, float)))
    return blocks


def repetition(blocks: Sequence[Texts], n: int = 4) -> list[Measurement]:
    """Compute the share of n-grams of words that occurred before in the same text, by block.

    An n-gram is in the block in which its last word begins.
    """
    num_prompts = len(blocks[0])
    repeated, total = np.zeros((2, len(blocks), num_prompts))
    for prompt, texts in enumerate(zip(*blocks, strict=True)):
        for parts in zip(*texts, strict=True):
            for block, again in _ngrams(parts, n):
                repeated[block, prompt] += again
                total[block, prompt] += 1
    return [Measurement(*pair) for pair in zip(repeated, total, strict=True)]


def _ngrams(parts: Sequence[str], n: int) -> list[tuple[int, bool]]:
    """Return the block of every n-gram of a text, and whether it occurred before."""
    ends = np.cumsum([len(part) for part in parts])
    words = list(re.finditer(r"\S+", "".join(parts)))
    seen: set[tuple[str, ...]] = set()
    ngrams = []
    for last in range(n - 1, len(words)):
        ngram = tuple(word.group() for word in words[last - n + 1 : last + 1])
        block = int(np.searchsorted(ends, words[last].start(), side="right"))
        ngrams.append((block, ngram in seen))
        seen.add(ngram)
    return ngrams


def describe_blocks(
    blocks: Sequence[Mapping[str, Measurement]],
    baseline: Sequence[Mapping[str, Measurement]],
) -> list[dict[str, Any]]:
    """Return every metric of every block with its interval, and its ratio to the baseline's.

    The perplexity of a block is the exponential of the mean loss of all its tokens.
    """
    return [
        {name: _describe(name, measured[name], bare[name]) for name in measured}
        for measured, bare in zip(blocks, baseline, strict=True)
    ]


def _describe(name: str, measurement: Measurement, baseline: Measurement) -> dict[str, Any]:
    value = metrics.interval(measurement)
    change = metrics.change(measurement, baseline)
    ratio = Interval(*(1 + bound for bound in change.relative))
    if name == LOSS:
        value, ratio = (Interval(*map(exp, one)) for one in (value, change.difference))
    return {**value._asdict(), "ratio": list(ratio)}
