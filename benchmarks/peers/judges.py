"""The judges of the suites that are no `train` of a suite, and what is known about every judge."""

import os
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from foretrace import _io
from foretrace.evaluate.suite import Table

TRAINED_ON = 6_000  # texts at most


def sentiment(texts: list[str]) -> list[float]:
    """Score how positive texts are by VADER, a lexicon of words that people rated."""
    return [(1 + _vader().polarity_scores(text)["compound"]) / 2 for text in texts]


def toxicity(texts: list[str]) -> list[float]:
    """Score how toxic texts are by alt-profanity-check, a support vector machine on word counts."""
    from profanity_check import predict_prob

    return [float(score) for score in predict_prob(texts)]


def sentiment_by_meaning(texts: list[str]) -> list[float]:
    """Score how positive texts are by embeddings alone, without their words."""
    return _by_meaning("sentiment/sst2_test.jsonl.xz", "positive")(texts)


def toxicity_by_meaning(texts: list[str]) -> list[float]:
    """Score how toxic texts are by embeddings alone, without their words."""
    return _by_meaning("detox/judge_train.jsonl.xz", "toxic")(texts)


@cache
def _by_meaning(file: str, label: str) -> Callable[[list[str]], list[float]]:
    """Train a logistic regression on embeddings of the second encoder, or read it."""
    from sentence_transformers import SentenceTransformer
    from sklearn.linear_model import LogisticRegression

    encoder = SentenceTransformer(os.environ["FORETRACE_SECOND_ENCODER"], device="cpu")

    def embed(texts: list[str]) -> Any:
        return encoder.encode(texts, normalize_embeddings=True, show_progress_bar=False)

    kept = Path(os.environ["FORETRACE_RESULTS"]) / "judges" / f"{label}-by-meaning.json"
    if not kept.is_file():
        rows = Table(file).rows(os.environ["FORETRACE_DATA"])
        random.Random(0).shuffle(rows)
        rows = rows[:TRAINED_ON]
        model = LogisticRegression(C=10.0, max_iter=1000)
        model.fit(embed([str(row["text"]) for row in rows]), [int(row[label]) for row in rows])
        kept.parent.mkdir(parents=True, exist_ok=True)
        found = {"weights": model.coef_[0].tolist(), "bias": float(model.intercept_[0])}
        _io.write_json(kept, found)
    known = _io.read_json(kept)
    weights, bias = np.array(known["weights"]), known["bias"]
    return lambda texts: (1 / (1 + np.exp(-embed(texts) @ weights - bias))).tolist()


@cache
def _vader() -> Any:
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    return SentimentIntensityAnalyzer()


ABOUT = {
    "toxicity": (
        "logistic regression on TF-IDF and MiniLM embeddings, trained on Jigsaw, Davidson and "
        "ParaDetox"
    ),
    "toxicity, profanity-check": (
        "alt-profanity-check 1.9.1 by other people: a support vector machine on word counts, "
        "trained on Jigsaw and Davidson. Another method, and in part the same texts"
    ),
    "toxicity, mpnet": (
        "logistic regression on mpnet embeddings alone, trained on 6,000 texts of the same "
        "sources. It does not see words as such"
    ),
    "positive, mpnet": (
        "logistic regression on mpnet embeddings alone, trained on SST-2's test set. It does not "
        "see words as such"
    ),
    "positive": "logistic regression on TF-IDF and MiniLM embeddings, trained on SST-2's test set",
    "positive, VADER": (
        "vaderSentiment 3.3.2 by other people: a lexicon of rated words with rules for negation "
        "and emphasis. Not trained, and nothing of SST-2. It sees words, as foretrace's attribute "
        "does, and may favour methods that add positive words"
    ),
    "politics": (
        "logistic regression on TF-IDF and MiniLM embeddings, trained on whole articles of the BBC"
    ),
    "politics, headlines": (
        "logistic regression on TF-IDF and mpnet embeddings, trained on headlines of HuffPost that "
        "are later than those of the attribute. Another encoder, publisher and length of text"
    ),
}
"""What each judge is, by name."""
