"""A classifier of whole texts: logistic regression on hidden states of a language model.

The mean of a middle layer's states says what a text is about and how it is written. The tokens that
an attribute rewards have no weights of their own in it, so that it judges attributes independently.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from foretrace.attribute.fitting.duplicates import near_duplicates
from foretrace.attribute.fitting.examples import Examples, Indices, require_content
from foretrace.attribute.fitting.split import clusters_of
from foretrace.engines.transformers.hidden_states import batches, encode_texts, middle_states
from foretrace.errors import InvalidInputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MAX_TEXTS = 2_000  # to fit to
MIN_TEXTS = 20  # with the attribute, and without it
MIN_AUC = 0.7  # below it, an attribute's own probability is the better judge
FOLDS = 5
RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # values of C, the inverse of the penalty
Floats = NDArray[np.float64]
OnTexts = Callable[[int, int], None]
"""Called with the number of texts that were read, and of all texts."""


def _silent(done: int, total: int) -> None:
    """Show no progress."""


@dataclass(frozen=True)
class TextClassifier:
    """Estimates the probability that a text has an attribute.

    Attributes:
        lm: The causal LM of transformers that reads texts.
        tokenizer: Its tokenizer.
        regression: The fitted pipeline of scikit-learn, on mean hidden states.
        auc: The cross-validated AUC.
        num_texts: The number of texts that it was fitted to.

    Example:
        >>> from foretrace.engines.transformers.text_classifier import TextClassifier
        >>> texts, scores = ["you fool", "dear customer"] * 20, [0.0, 1.0] * 20
        >>> polite = TextClassifier.fit(model, tokenizer, texts, scores)
        >>> rude, kind = polite.score(["you fool", "dear customer"])
        >>> rude < 0.5 < kind
        True
    """

    lm: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    regression: Any
    auc: float
    num_texts: int

    @property
    def is_trusted(self) -> bool:
        """Whether it tells texts apart well enough to judge others."""
        return self.auc >= MIN_AUC

    @classmethod
    def fit(
        cls,
        lm: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase",
        texts: Sequence[str],
        scores: Sequence[float],
        *,
        seed: int = 0,
        on_progress: OnTexts = _silent,
    ) -> Self:
        """Fit to as many texts with the attribute as without it, at most MAX_TEXTS.

        A text has the attribute if its score is at least 0.5. If all texts are on one side, the
        median is the threshold. Cross-validation, which holds near duplicates out together, chooses
        the ridge penalty.

        Args:
            lm: A causal LM of transformers.
            tokenizer: Its tokenizer.
            texts: The texts. Only their first MAX_TOKENS tokens are read.
            scores: The probability that each text has the attribute.
            seed: The seed of the sample and of the folds.
            on_progress: Called after every batch of texts.

        Returns:
            The classifier.

        Raises:
            InvalidInputError: If a text is blank, or there are fewer than MIN_TEXTS on a side.
        """
        from sklearn.metrics import log_loss, roc_auc_score
        from sklearn.model_selection import StratifiedGroupKFold, cross_val_predict

        require_content(texts)
        labels = _labels(np.asarray(scores, dtype=np.float64))
        chosen = _balanced(labels, np.random.default_rng(seed))
        labels = labels[chosen]
        texts = [texts[row] for row in chosen]
        states = mean_states(lm, tokenizer, texts, on_progress)
        groups = _near_duplicates(encode_texts(tokenizer, texts), labels)
        folds = StratifiedGroupKFold(FOLDS, shuffle=True, random_state=seed)
        predicted = {
            ridge: cross_val_predict(
                _regression(ridge), states, labels, groups=groups, cv=folds, method="predict_proba"
            )[:, 1]
            for ridge in RIDGES
        }
        best = min(RIDGES, key=lambda ridge: log_loss(labels, predicted[ridge]))
        auc = float(roc_auc_score(labels, predicted[best]))
        return cls(lm, tokenizer, _regression(best).fit(states, labels), auc, len(chosen))

    def score(self, texts: Sequence[str], *, on_progress: OnTexts = _silent) -> list[float]:
        """Return the probability that each text has the attribute.

        Args:
            texts: The texts. An empty text is allowed.
            on_progress: Called after every batch of texts.

        Returns:
            The probabilities.
        """
        return self.score_states(mean_states(self.lm, self.tokenizer, texts, on_progress))

    def score_states(self, states: Floats) -> list[float]:
        """Return the probability of texts whose mean hidden states (n, d) are known."""
        probabilities: list[float] = self.regression.predict_proba(states)[:, 1].tolist()
        return probabilities


def are_enough(texts: Sequence[str], scores: Sequence[float]) -> bool:
    """Return whether a classifier can be fitted to texts: none is blank, and no side is small."""
    try:
        require_content(texts)
        _balanced(_labels(np.asarray(scores, dtype=np.float64)), np.random.default_rng(0))
    except InvalidInputError:
        return False
    return True


def mean_states(
    lm: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    texts: Sequence[str],
    on_progress: OnTexts = _silent,
) -> Floats:
    """Compute the mean hidden state of each text in a middle layer.

    A token that begins a text is put before each, because LMs give the first token of a sequence a
    state of its own. It does not count, unless the text is empty.

    Args:
        lm: A causal LM of transformers.
        tokenizer: Its tokenizer.
        texts: The texts. Only their first MAX_TOKENS tokens are read.
        on_progress: Called after every batch of texts.

    Returns:
        The states, of shape (n, d).
    """
    starts = [tokenizer.bos_token_id, tokenizer.eos_token_id]
    start = [token for token in starts if isinstance(token, int)][:1]
    rows = encode_texts(tokenizer, texts)
    means: list[Floats | None] = [None] * len(rows)
    done = 0
    for batch in batches(rows, start):
        for row, states in zip(
            batch.texts, middle_states(lm, batch.ids).float().cpu(), strict=True
        ):
            first = len(start) if rows[row] else 0
            read = states[first : max(1, len(start) + len(rows[row]))]
            means[row] = read.mean(0).double().numpy()
        done += len(batch.texts)
        on_progress(done, len(rows))
    return np.stack([mean for mean in means if mean is not None])


def _near_duplicates(rows: Sequence[Sequence[int]], labels: NDArray[np.bool_]) -> Indices:
    """Return a number for each text, which near duplicates share."""
    examples = Examples.from_scores(rows, labels.astype(float).tolist(), max(map(max, rows)) + 1)
    return clusters_of(near_duplicates(examples.shingles), examples.strata)


def _labels(scores: Floats) -> NDArray[np.bool_]:
    """Return which texts have the attribute."""
    labels: NDArray[np.bool_] = scores >= 0.5
    return labels if 0 < labels.sum() < len(labels) else scores > np.median(scores)


def _balanced(labels: NDArray[np.bool_], random: np.random.Generator) -> NDArray[np.int64]:
    """Draw as many texts with the attribute as without it, and return their indices."""
    sides = [np.flatnonzero(labels == side) for side in (False, True)]
    size = min(MAX_TEXTS // 2, *map(len, sides))
    if size < MIN_TEXTS:
        raise InvalidInputError(
            f"A classifier of texts needs at least {MIN_TEXTS} texts with the attribute and "
            f"{MIN_TEXTS} without it, but there are {len(sides[1])} and {len(sides[0])}."
        )
    return np.sort(np.concatenate([random.permutation(side)[:size] for side in sides]))


def _regression(ridge: float) -> Any:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), LogisticRegression(C=ridge, max_iter=1000))
