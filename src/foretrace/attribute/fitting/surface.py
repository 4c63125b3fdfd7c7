"""What texts have besides their words: length, punctuation, capital letters and numbers."""

from collections.abc import Mapping

import numpy as np

from foretrace.attribute.fitting.examples import Array, Examples, Indices
from foretrace.attribute.fitting.words import Decoder

NUM_BINS = 10
NUM_MARKS = 6  # punctuation marks, the most frequent ones: 64 combinations
NUM_DECODED = 5000  # the most frequent tokens: decoding all takes longer than a fit
NOT_DECODED = "\N{REPLACEMENT CHARACTER}"  # a token that is a part of a character

Surface = Mapping[str, Indices]
"""One of a few cells for each text, by the name of a feature."""


def surface(examples: Examples, tokenizer: Decoder | None) -> Surface:
    """Sort texts into cells by each feature of their surface; without a tokenizer, by length."""
    lengths = np.asarray(examples.counts.sum(1))
    cells = {"length": _bins(lengths)}
    if tokenizer is None:
        return cells
    texts_with = np.bincount(examples.counts.indices, minlength=examples.counts.shape[1])
    tokens = np.argsort(-texts_with, kind="stable")[: min(NUM_DECODED, np.sum(texts_with > 0))]
    spelled = [str(tokenizer.decode([token])).strip() for token in tokens.tolist()]
    marks = tokens[[is_mark(text) for text in spelled]][:NUM_MARKS]
    cells["punctuation"] = (examples.counts[:, marks].toarray() > 0) @ (1 << np.arange(len(marks)))
    for name, selected in (
        ("the share of capitalised words", [text[:1].isupper() for text in spelled]),
        ("the share of numbers", [text[:1].isdigit() for text in spelled]),
    ):
        cells[name] = _bins(np.asarray(examples.counts[:, tokens[selected]].sum(1)) / lengths)
    return cells


def is_mark(text: str) -> bool:
    """Return whether a token is neither a word nor a number, nor a part of one."""
    return NOT_DECODED not in text and not any(map(str.isalnum, text))


def predict(cells: Indices, examples: Examples) -> Array:
    """Predict the score of each text by the mean of its cell in the other half of the texts."""
    half = np.unique(examples.groups, return_inverse=True)[1] % 2
    predicted = np.zeros(len(cells))
    for rows in (half == 0, half == 1):
        scores, size = examples.scores[rows], int(cells.max()) + 1
        sums = np.bincount(cells[rows], scores, size) + scores.mean()
        predicted[~rows] = (sums / (np.bincount(cells[rows], minlength=size) + 1))[cells[~rows]]
    return predicted


def _bins(values: Array) -> Indices:
    """Sort values into bins of about equally many texts."""
    edges = np.unique(np.quantile(values, np.linspace(0, 1, NUM_BINS + 1)[1:-1]))
    return np.searchsorted(edges, values)
