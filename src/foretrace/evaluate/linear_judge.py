"""A trainable judge: logistic regression on hashed TF-IDF features and sentence embeddings.

A judge is saved as safetensors and JSON, without pickle. Features are hashed, so there is no
vocabulary to save.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from foretrace import _io
from foretrace.errors import InvalidFileError, InvalidInputError, reason

CONFIG, TENSORS = "judge.json", "judge.safetensors"
FORMAT_VERSION = 1
ENCODER_DTYPES = ("float16", "bfloat16", "float32", "float64")
ENCODER_TOKENS = 128  # after which the encoder truncates a text
BUCKETS = 1 << 18  # hashed features of words and pairs of words; also of characters
EMBEDDING_SCALE = 4.0  # embeddings have length 1 like the TF-IDF features
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class LinearJudgeConfig:
    """The features of a linear judge, and the data that it was trained on.

    Attributes:
        classes: The labels that the judge distinguishes. If there are two, the second is the
            positive class.
        encoder: A sentence-transformers model, by folder or hub id; None for TF-IDF alone.
        encoder_dtype: The floating-point type in which the encoder runs.
        source: The name of the training data.

    Example:
        >>> from foretrace.evaluate.linear_judge import LinearJudgeConfig
        >>> LinearJudgeConfig(("polite", "rude")).encoder is None
        True
    """

    classes: tuple[str, ...]
    encoder: str | None = None
    encoder_dtype: str = "float32"
    source: str = ""

    def __post_init__(self) -> None:
        encoder = "" if self.encoder is None else self.encoder
        names = (encoder, self.encoder_dtype, self.source, *self.classes)
        if not all(isinstance(name, str) for name in names):
            raise InvalidInputError("classes, encoder, encoder_dtype and source must be strings")
        if len(set(self.classes)) != len(self.classes) or len(self.classes) < 2:
            raise InvalidInputError("classes must be at least two different names")
        if self.encoder_dtype not in ENCODER_DTYPES:
            raise InvalidInputError(
                f"encoder_dtype is '{self.encoder_dtype}', but it must be one of "
                f"{', '.join(ENCODER_DTYPES)}"
            )


class LinearJudge:
    """A classifier of texts by logistic regression.

    Args:
        config: The features and classes.
        idf: The inverse document frequency of each hashed feature, of shape (2 BUCKETS,).
        weights: The coefficients, of shape (classes, features); one row if there are two classes.
        intercepts: The intercepts, of shape (classes,); one if there are two classes.

    Example:
        >>> from foretrace.evaluate.linear_judge import LinearJudge
        >>> texts = ["you fool", "thank you", "you idiot", "thanks a lot"]
        >>> judge = LinearJudge.train(texts, ["rude", "kind", "rude", "kind"])
        >>> judge.config.classes
        ('kind', 'rude')
        >>> judge.probabilities(["you fool"]).shape
        (1, 2)
        >>> rude, kind = judge.scorer("rude")(["you fool", "thank you"])
        >>> rude > 0.5 > kind
        True
        >>> judge.save(folder / "judge")
        >>> LinearJudge.load(folder / "judge").identity == judge.identity
        True
    """

    def __init__(
        self, config: LinearJudgeConfig, idf: Floats, weights: Floats, intercepts: Floats
    ) -> None:
        self.config = config
        self.idf, self.weights, self.intercepts = idf, weights, intercepts

    @classmethod
    def train(
        cls,
        texts: Sequence[str],
        labels: Sequence[str],
        *,
        encoder: str | os.PathLike[str] | None = None,
        encoder_dtype: str = "float32",
        source: str = "",
    ) -> Self:
        """Train a judge on labelled texts.

        Args:
            texts: The texts.
            labels: The label of each text.
            encoder: A sentence-transformers model, by folder or hub id; None for TF-IDF alone.
            encoder_dtype: The floating-point type in which the encoder runs.
            source: The name of the data, for the record.

        Returns:
            The trained judge.

        Raises:
            InvalidInputError: If there are fewer than two different labels, or the encoder cannot
                be loaded.
        """
        from sklearn.linear_model import LogisticRegression

        classes = tuple(sorted(set(labels)))
        if len(classes) < 2:
            raise InvalidInputError(
                f"A judge needs at least two labels to distinguish, but all {len(texts)} texts "
                f"have {classes or 'none'}."
            )
        encoder = None if encoder is None else os.fspath(encoder)
        config = LinearJudgeConfig(classes, encoder, encoder_dtype, source)
        judge = cls(config, *(np.zeros(0, np.float32) for _ in range(3)))
        counts = judge._hashed_counts(texts)
        document_frequency = np.bincount(counts.indices, minlength=counts.shape[1])
        judge.idf = (np.log((1 + len(texts)) / (1 + document_frequency)) + 1).astype(np.float32)
        features = judge._features(texts, counts)
        regression = LogisticRegression(max_iter=200, tol=1e-3)
        # Features that no text has keep weight 0, and are most of them if there are few texts.
        present = np.flatnonzero(features.getnnz(0))
        regression.fit(features[:, present], [classes.index(label) for label in labels])
        judge.weights = np.zeros((len(regression.coef_), features.shape[1]), np.float32)
        judge.weights[:, present] = regression.coef_
        judge.intercepts = regression.intercept_.astype(np.float32)
        return judge

    def probabilities(self, texts: Sequence[str]) -> Floats:
        """Compute the probability of every class.

        Args:
            texts: The texts.

        Returns:
            An array of shape (texts, classes). Every row sums to 1.

        Raises:
            InvalidInputError: If the encoder cannot be loaded, or its embeddings have another width
                than those that the judge was trained with.
        """
        features = self._features(texts, self._hashed_counts(texts))
        if features.shape[1] != self.weights.shape[1]:
            hashed = 2 * BUCKETS
            raise InvalidInputError(
                f"The encoder '{self.config.encoder}' returns embeddings of width "
                f"{features.shape[1] - hashed}, but the judge was trained with width "
                f"{self.weights.shape[1] - hashed}. Pass the encoder that it was trained with."
            )
        logits = np.asarray(features @ self.weights.T) + self.intercepts
        if logits.shape[1] == 1:  # two classes: the log-odds of the second
            logits = np.concatenate([np.zeros_like(logits), logits], axis=1)
        exponentials = np.exp(logits - logits.max(1, keepdims=True))
        probabilities: Floats = exponentials / exponentials.sum(1, keepdims=True)
        return probabilities

    def scorer(self, label: str | None) -> Callable[[list[str]], list[float]]:
        """Return a function from texts to the probabilities of one class.

        Args:
            label: The class. It may be None if there are two, and is then the second.

        Returns:
            A function from a list of texts to a list of probabilities.

        Raises:
            InvalidInputError: If the judge does not have the class.
        """
        classes = self.config.classes
        if label is None and len(classes) == 2:
            label = classes[1]
        if label not in classes:
            raise InvalidInputError(
                f"The judge has no class '{label}'; it has {', '.join(classes[:20])}."
            )
        column = classes.index(label)
        return lambda texts: [float(value) for value in self.probabilities(texts)[:, column]]

    @property
    def identity(self) -> str:
        """A name that depends on the judge's weights, under which judgements are cached."""
        return f"linear-{_io.checksum(torch.from_numpy(self.weights)):08x}"

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Save the judge as `judge.json` and `judge.safetensors`.

        Args:
            folder: The folder to write; it is created if necessary.
        """
        folder = Path(folder)
        content = {"format_version": FORMAT_VERSION, **asdict(self.config)}
        arrays = {"idf": self.idf, "weights": self.weights, "intercepts": self.intercepts}
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        _io.write_tensors_and_json(folder / TENSORS, tensors, {}, folder / CONFIG, content)

    @classmethod
    def load(
        cls, folder: str | os.PathLike[str], *, encoder: str | os.PathLike[str] | None = None
    ) -> Self:
        """Load a judge that `save` wrote.

        The encoder that the file names is never loaded on the file's word: loading a judge from
        somebody else must not load another model, or its code.

        Args:
            folder: The folder of the judge.
            encoder: The sentence-transformers model to use, by folder or hub id. A judge that was
                trained with an encoder requires it; other judges ignore it.

        Returns:
            The judge. Its encoder is loaded when it is first used.

        Raises:
            InvalidFileError: If the files are missing or malformed.
            InvalidInputError: If the judge uses embeddings and no encoder is given.
        """
        folder = Path(folder)
        config = _read_config(folder / CONFIG)
        if config.encoder is not None:
            if encoder is None:
                raise InvalidInputError(
                    f"The judge in {folder} was trained with the encoder '{config.encoder}', which "
                    f"is not loaded automatically, for security. If you trust it, pass "
                    f"encoder='{config.encoder}' (--encoder on the command line), or the folder of "
                    f"a copy."
                )
            config = replace(config, encoder=os.fspath(encoder))
        return cls(config, *_read_arrays(folder / TENSORS, config))

    def _hashed_counts(self, texts: Sequence[str]) -> Any:
        """Count hashed word and character n-grams: (texts, 2 BUCKETS), sparse."""
        from scipy.sparse import hstack
        from sklearn.feature_extraction.text import HashingVectorizer

        common = {"n_features": BUCKETS, "alternate_sign": False, "norm": None}
        words = HashingVectorizer(ngram_range=(1, 2), token_pattern=r"\S+", **common)
        characters = HashingVectorizer(analyzer="char_wb", ngram_range=(3, 5), **common)
        return hstack([words.transform(texts), characters.transform(texts)], "csr", np.float32)

    def _features(self, texts: Sequence[str], counts: Any) -> Any:
        """Compute TF-IDF, normalized for words and for characters, and append embeddings."""
        from scipy.sparse import csr_matrix, hstack
        from sklearn.preprocessing import normalize

        counts.data = 1 + np.log(counts.data)
        tf_idf = counts.multiply(self.idf).tocsr()
        blocks = [normalize(tf_idf[:, :BUCKETS]), normalize(tf_idf[:, BUCKETS:])]
        if self._encoder is not None:
            encode = self._encoder.encode
            embeddings = encode(list(texts), normalize_embeddings=True, show_progress_bar=False)
            blocks.append(csr_matrix(EMBEDDING_SCALE * embeddings))
        return hstack(blocks, "csr", np.float32)

    @cached_property
    def _encoder(self) -> Any:
        """The sentence-transformers model, or None."""
        if self.config.encoder is None:
            return None
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise InvalidInputError(
                "Embeddings need sentence-transformers: pip install 'foretrace[evaluate]'."
            ) from error
        try:
            encoder = SentenceTransformer(
                self.config.encoder,
                trust_remote_code=False,
                model_kwargs={
                    "dtype": getattr(torch, self.config.encoder_dtype),
                    "use_safetensors": True,  # never pickle
                },
            )
            encoder.max_seq_length = ENCODER_TOKENS
            return encoder
        except (OSError, ValueError, RuntimeError, AttributeError) as error:
            raise InvalidInputError(
                f"The encoder '{self.config.encoder}' cannot be loaded ({reason(error)}). Pass the "
                f"folder or hub id of a sentence-transformers model."
            ) from error


def _read_config(path: Path) -> LinearJudgeConfig:
    """Read and check a judge's JSON file."""
    content = _io.read_json(path)
    if content.pop("format_version", None) != FORMAT_VERSION:
        raise InvalidFileError(
            f"{path} was written by another version of foretrace. Train the judge again."
        )
    try:
        if not isinstance(content["classes"], list):
            raise InvalidInputError("classes must be a list")
        return LinearJudgeConfig(**{**content, "classes": tuple(content["classes"])})
    except (TypeError, KeyError, OverflowError, InvalidInputError) as error:
        raise InvalidFileError(
            f"{path} is not the config of a judge ({reason(error)}). Train it again."
        ) from error


def _read_arrays(path: Path, config: LinearJudgeConfig) -> tuple[Floats, Floats, Floats]:
    """Read and check a judge's tensors: (idf, weights, intercepts)."""
    tensors, _ = _io.read_tensors(path)
    hashed = 2 * BUCKETS
    rows = 1 if len(config.classes) == 2 else len(config.classes)
    weights, width = tensors.get("weights"), hashed
    if config.encoder is not None and weights is not None and weights.dim() == 2:
        width = max(hashed + 1, weights.shape[1])  # the encoder decides the rest of the width
    shapes = {"idf": (hashed,), "weights": (rows, width), "intercepts": (rows,)}
    arrays = []
    for name, shape in shapes.items():
        tensor = _io.take_tensor(tensors, name, shape, path)
        if tensor.dtype != torch.float32 or not tensor.isfinite().all():
            raise InvalidFileError(
                f"{path}: tensor '{name}' must hold finite numbers of type float32. Copy, download "
                f"or train the judge again."
            )
        arrays.append(tensor.numpy())
    idf, weights_array, intercepts = arrays
    return idf, weights_array, intercepts
