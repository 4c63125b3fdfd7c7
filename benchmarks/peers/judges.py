"""The second judges of the suites, by other people, and what is known about every judge."""

from functools import cache
from typing import Any


def sentiment(texts: list[str]) -> list[float]:
    """Score how positive texts are by VADER, a lexicon of words that people rated."""
    return [(1 + _vader().polarity_scores(text)["compound"]) / 2 for text in texts]


def toxicity(texts: list[str]) -> list[float]:
    """Score how toxic texts are by alt-profanity-check, a support vector machine on word counts."""
    from profanity_check import predict_prob

    return [float(score) for score in predict_prob(texts)]


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
