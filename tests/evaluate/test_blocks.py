"""Test metrics by position: where texts are cut, and what each block measures."""

from math import exp, log

import numpy as np
import pytest

pytest.importorskip("transformers", reason="needs the extra `transformers`")

from foretrace.evaluate import metrics
from foretrace.evaluate.blocks import (
    BLOCK,
    describe_blocks,
    has_blocks,
    repetition,
    split_losses,
    split_texts,
)
from foretrace.evaluate.metrics import Measurement
from tiny_lm import byte_tokenizer, word_tokenizer


def text_of(count: int) -> str:
    """Return a text of so many tokens of the word tokenizer."""
    return "".join(f" w{number % 60}" for number in range(count))


def test_texts_are_cut_between_tokens() -> None:
    limit = 2 * BLOCK + 6
    texts = [[text_of(limit), text_of(BLOCK)], [""]]
    blocks = split_texts(word_tokenizer(), texts, limit)
    counts = [[[len(part.split()) for part in row] for row in block] for block in blocks]
    assert counts == [[[BLOCK, BLOCK], [0]], [[BLOCK, 0], [0]], [[6, 0], [0]]]
    for prompt, row in enumerate(texts):
        for index, text in enumerate(row):
            assert "".join(block[prompt][index] for block in blocks) == text


def test_a_character_of_several_tokens_is_not_cut() -> None:
    tokenizer = byte_tokenizer(["hello"], 257)  # one token for each byte
    text = "a" * (BLOCK - 1) + "\N{GRINNING FACE}" + "b"
    first, second = split_texts(tokenizer, [[text]], 2 * BLOCK)
    assert first[0][0] + second[0][0] == text
    assert "\N{GRINNING FACE}" in first[0][0] or "\N{GRINNING FACE}" in second[0][0]


def test_tokens_beyond_the_limit_are_in_the_last_block() -> None:
    limit = 2 * BLOCK
    texts = [[text_of(limit + 3)]]
    assert len(split_texts(word_tokenizer(), texts, limit)[1][0][0].split()) == BLOCK + 3
    assert [block.counts.tolist() for block in split_losses([[[1.0] * (limit + 3)]], limit)] == [
        [BLOCK],
        [BLOCK + 3],
    ]
    assert not has_blocks(BLOCK, word_tokenizer())
    assert has_blocks(BLOCK + 1, word_tokenizer())


def test_losses_are_means_over_the_tokens_of_a_block() -> None:
    long, short = [1.0] * BLOCK + [3.0] * 2, [2.0] * BLOCK
    first, second = split_losses([[long, short], [[]]], 2 * BLOCK)
    assert first.value == 1.5
    assert second.value == 3.0
    assert second.counts.tolist() == [2, 0]


def test_repetition_counts_earlier_blocks() -> None:
    blocks = [[["a b c", "x y"], [""]], [[" a b", ""], [""]]]
    first, second = repetition(blocks, n=2)
    assert first.value == 0
    assert second.value == 0.5  # "c a" is new, "a b" is in the first block
    assert second.counts.tolist() == [2, 0]
    total = metrics.repetition([["a b c a b", "x y"], [""]], n=2)
    assert first.counts.sum() + second.counts.sum() == total.counts.sum()
    assert first.totals.sum() + second.totals.sum() == total.totals.sum()


def test_a_word_is_in_the_block_in_which_it_begins() -> None:
    first, second = repetition([[["a b a b"]], [["b a b"]]], n=2)  # a b a bb a b
    assert first.counts.sum() == 3
    assert second.counts.sum() == 2
    assert second.totals.sum() == 1


def test_perplexity_is_the_exponential_of_the_loss() -> None:
    bare = {"perplexity": Measurement(np.array([4.0, 8.0]), np.array([4.0, 4.0]))}
    steered = {"perplexity": Measurement(np.array([6.0, 6.0]) + 8 * log(1.1) / 2, np.full(2, 4.0))}
    ((figure),) = [block["perplexity"] for block in describe_blocks([steered], [bare])]
    assert figure["value"] == pytest.approx(exp(1.5) * 1.1)
    assert figure["ratio"][0] == pytest.approx(1.1)
    assert figure["low"] <= figure["value"] <= figure["high"]
