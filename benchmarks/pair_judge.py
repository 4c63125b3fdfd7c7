"""A judge of pairs: whether an answer is to this question or to another one.

It is trained on right pairs, and on as many wrong ones. The features of a pair are the cosine, the
product and the absolute difference of the two texts' vectors: sentence embeddings, or TF-IDF
without an encoder.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix, hstack
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import MaxAbsScaler

Pairs = Sequence[tuple[str, str]]
"""Questions with their answers."""
Floats = NDArray[np.float64]


class PairJudge:
    """A logistic regression on the features of pairs."""

    def __init__(self, encoder: str | None) -> None:
        self._encoder: Any = None
        self._tf_idf = TfidfVectorizer(sublinear_tf=True, stop_words="english")
        self._scaler = MaxAbsScaler()
        self._regression = LogisticRegression(C=1.0, max_iter=500)
        if encoder is not None:
            from sentence_transformers import SentenceTransformer

            self._encoder = SentenceTransformer(
                encoder, trust_remote_code=False, model_kwargs={"use_safetensors": True}
            )
            self._encoder.max_seq_length = 128

    @classmethod
    def train(cls, right: Pairs, wrong: Pairs, encoder: str | None) -> Self:
        """Train on right and wrong pairs."""
        judge = cls(encoder)
        pairs = [*right, *wrong]
        judge._tf_idf.fit([text for pair in pairs for text in pair])
        features = judge._scaler.fit_transform(judge._features(pairs))
        judge._regression.fit(features, [1] * len(right) + [0] * len(wrong))
        return judge

    def score(self, pairs: Pairs) -> Floats:
        """Return the probability of each pair to be right."""
        features = self._scaler.transform(self._features(pairs))
        scores: Floats = self._regression.predict_proba(features)[:, 1]
        return scores

    def auc(self, right: Pairs, wrong: Pairs) -> float:
        """Return the share of a right and a wrong pair in which the right one scores higher."""
        labels = [1] * len(right) + [0] * len(wrong)
        return float(roc_auc_score(labels, self.score([*right, *wrong])))

    def _features(self, pairs: Pairs) -> Any:
        """Compute the product and the absolute difference of the vectors, and their cosine."""
        questions, answers = (self._vectors(list(texts)) for texts in zip(*pairs, strict=True))
        product = questions.multiply(answers).tocsr()
        cosine = csr_matrix(product.sum(1))
        return hstack([cosine, product, abs(questions - answers)], "csr")

    def _vectors(self, texts: list[str]) -> Any:
        """Compute the vectors of texts, of length 1: (texts, features), sparse."""
        if self._encoder is None:
            return self._tf_idf.transform(texts)
        settings = {"normalize_embeddings": True, "show_progress_bar": False}
        rows = {text: row for row, text in enumerate(dict.fromkeys(texts))}
        vectors = csr_matrix(self._encoder.encode(list(rows), **settings).astype(float))
        return vectors[[rows[text] for text in texts]]


def pairs_of(rows: Sequence[Mapping[str, Any]]) -> tuple[Pairs, Pairs]:
    """Return the right pairs, and wrong ones: each question with another answer of its role.

    The wrong answer has the same speaker, so that a judge must attend to the subject.
    """
    by_role: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_role.setdefault(row["role"], []).append(row)
    right, wrong = [], []
    for members in by_role.values():
        for row, other in zip(members, [*members[1:], members[0]], strict=True):
            if row["question"] != other["question"]:
                right.append((row["question"], row["answer"]))
                wrong.append((row["question"], other["answer"]))
    return right, wrong
