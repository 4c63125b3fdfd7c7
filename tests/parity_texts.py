"""Texts for tests: whether a token has an even number is an attribute that any LM can tell."""

import random

from tiny_lm import WORDS

EVEN = [float(number % 2 == 0) for number in range(len(WORDS))]  # of tokens


def scored_texts(meaningful: bool) -> tuple[list[str], list[float]]:
    """Texts of one parity or the other; their scores may have nothing to do with it."""
    source, texts, scores = random.Random(0), [], []
    for number in range(200):
        side = number % 2
        words = [word for word, even in zip(WORDS, EVEN, strict=True) if even == side][1:]
        texts.append(" ".join(source.choices(words, k=16)))
        scores.append(float(side) if meaningful else float(source.random() < 0.5))
    return texts, scores
