"""A judge to train at home: TF-IDF and sentence embeddings under a linear head.

It is saved as numbers and settings, without pickle: words are hashed, so there is no vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import isfinite
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
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class LinearJudgeConfig:
    """How texts become features, and what the judge was trained on."""

    classes: tuple[str, ...]
    """What it tells apart; of two, the second is what is judged."""
    encoder: str | None = None
    """A model of sentence-transformers, by folder or hub id; None for TF-IDF alone."""
    encoder_dtype: str = "float32"
    encoder_tokens: int = 128
    """What is longer is cut."""
    buckets: int = 1 << 18
    """Hashed features, of words and pairs, and as many again of pieces of words."""
    embedding_scale: float = 4.0
    """Of embeddings, which have length 1, as TF-IDF has."""
    regularisation: float = 1.0
    """Strength C of scikit-learn: the greater, the weaker it holds weights down."""
    source: str = ""

    def __post_init__(self) -> None:
        encoder = "" if self.encoder is None else self.encoder
        names = (encoder, self.encoder_dtype, self.source, *self.classes)
        counts = (self.encoder_tokens, self.buckets)
        scales = (self.embedding_scale, self.regularisation)
        if not all(isinstance(name, str) for name in names):
            raise InvalidInputError("classes, encoder, encoder_dtype and source must be strings")
        if len(set(self.classes)) != len(self.classes) or len(self.classes) < 2:
            raise InvalidInputError("classes must be at least two different names")
        if self.encoder_dtype not in ENCODER_DTYPES:
            raise InvalidInputError(
                f"encoder_dtype is '{self.encoder_dtype}', but it must be one of "
                f"{', '.join(ENCODER_DTYPES)}"
            )
        if not all(type(count) is int and count > 0 for count in counts):
            raise InvalidInputError("encoder_tokens and buckets must be positive integers")
        if not all(type(scale) in (int, float) and isfinite(scale) for scale in scales):
            raise InvalidInputError("embedding_scale and regularisation must be finite numbers")


class LinearJudge:
    """Gives the probability of each class; trained by logistic regression."""

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
        encoder: str | None = None,
        encoder_dtype: str = "float32",
        source: str = "",
        regularisation: float = 1.0,
    ) -> Self:
        """Train on labelled texts; the encoder is a model of sentence-transformers."""
        from sklearn.linear_model import LogisticRegression

        classes = tuple(sorted(set(labels)))
        if len(classes) < 2:
            raise InvalidInputError(
                f"A judge tells at least two labels apart, but all {len(texts)} texts have "
                f"{classes or 'none'}."
            )
        config = LinearJudgeConfig(
            classes,
            encoder,
            encoder_dtype,
            source=source,
            regularisation=regularisation,
        )
        judge = cls(config, *(np.zeros(0, np.float32) for _ in range(3)))
        counted = judge._counted(texts)
        present = np.bincount(counted.indices, minlength=counted.shape[1])
        judge.idf = (np.log((1 + len(texts)) / (1 + present)) + 1).astype(np.float32)
        features = judge._features(texts, counted)
        head = LogisticRegression(C=regularisation, max_iter=200, tol=1e-3)
        head.fit(features, [classes.index(label) for label in labels])
        judge.weights = head.coef_.astype(np.float32)
        judge.intercepts = head.intercept_.astype(np.float32)
        return judge

    def probabilities(self, texts: Sequence[str]) -> Floats:
        """Give the probability of every class: (texts, classes)."""
        features = self._features(texts, self._counted(texts))
        if features.shape[1] != self.weights.shape[1]:
            hashed = 2 * self.config.buckets
            raise InvalidInputError(
                f"The encoder '{self.config.encoder}' returns embeddings of width "
                f"{features.shape[1] - hashed}, but the judge was trained with width "
                f"{self.weights.shape[1] - hashed}. Give the encoder that it was trained with."
            )
        scores = np.asarray(features @ self.weights.T) + self.intercepts
        if scores.shape[1] == 1:  # of two classes, the second's log-odds
            scores = np.concatenate([np.zeros_like(scores), scores], axis=1)
        powers = np.exp(scores - scores.max(1, keepdims=True))
        found: Floats = powers / powers.sum(1, keepdims=True)
        return found

    def scorer(self, label: str | None) -> Callable[[list[str]], list[float]]:
        """Give what scores texts by the probability of a class; of two, the second if not named."""
        classes = self.config.classes
        if label is None and len(classes) == 2:
            label = classes[1]
        if label not in classes:
            raise InvalidInputError(
                f"The judge has no class '{label}'; it has {', '.join(classes[:20])}."
            )
        column = classes.index(label)
        return lambda texts: [float(each) for each in self.probabilities(texts)[:, column]]

    @property
    def identity(self) -> str:
        """Name it by its numbers."""
        return f"linear-{_io.checksum(torch.from_numpy(self.weights)):08x}"

    def save(self, folder: Path) -> None:
        """Write two files into a folder."""
        content = {"format_version": FORMAT_VERSION, **asdict(self.config)}
        arrays = {"idf": self.idf, "weights": self.weights, "intercepts": self.intercepts}
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        _io.write_tensors_and_json(folder / TENSORS, tensors, {}, folder / CONFIG, content)

    @classmethod
    def load(cls, folder: Path, *, encoder: str | None = None) -> Self:
        """Load a judge that `save` wrote.

        The encoder that the file names is never loaded on the file's word: loading a judge from
        somebody else must not load another model, or its code. `encoder` names the one to use.
        """
        config = _read_config(folder / CONFIG)
        if config.encoder is not None:
            if encoder is None:
                raise InvalidInputError(
                    f"The judge in {folder} was trained with the encoder '{config.encoder}', which "
                    f"is not loaded only because a file names it. If you trust it, give "
                    f"encoder='{config.encoder}' (--encoder on the command line), or the folder of "
                    f"a copy."
                )
            config = replace(config, encoder=encoder)
        return cls(config, *_read_arrays(folder / TENSORS, config))

    def _counted(self, texts: Sequence[str]) -> Any:
        """Hash words and pieces of words: (texts, 2 buckets), sparse."""
        from scipy.sparse import hstack
        from sklearn.feature_extraction.text import HashingVectorizer

        common = {"n_features": self.config.buckets, "alternate_sign": False, "norm": None}
        words = HashingVectorizer(ngram_range=(1, 2), token_pattern=r"\S+", **common)
        pieces = HashingVectorizer(analyzer="char_wb", ngram_range=(3, 5), **common)
        return hstack([words.transform(texts), pieces.transform(texts)], "csr", np.float32)

    def _features(self, texts: Sequence[str], counted: Any) -> Any:
        """Weigh counts by rarity, each half to length 1, and put embeddings beside them."""
        from scipy.sparse import csr_matrix, hstack
        from sklearn.preprocessing import normalize

        counted.data = 1 + np.log(counted.data)
        weighed = counted.multiply(self.idf).tocsr()
        half = self.config.buckets
        parts = [normalize(weighed[:, :half]), normalize(weighed[:, half:])]
        if self._encoder is not None:
            encode = self._encoder.encode
            embedded = encode(list(texts), normalize_embeddings=True, show_progress_bar=False)
            parts.append(csr_matrix(self.config.embedding_scale * embedded))
        return hstack(parts, "csr", np.float32)

    @cached_property
    def _encoder(self) -> Any:
        """The model of sentence-transformers, if there is one."""
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
            encoder.max_seq_length = self.config.encoder_tokens
            return encoder
        except (OSError, ValueError, RuntimeError, AttributeError) as error:
            raise InvalidInputError(
                f"The encoder '{self.config.encoder}' cannot be loaded ({reason(error)}). Give the "
                f"folder or hub id of a model of sentence-transformers."
            ) from error


def _read_config(path: Path) -> LinearJudgeConfig:
    """Read and check a judge's JSON file."""
    content = _io.read_json(path)
    if content.pop("format_version", None) != FORMAT_VERSION:
        raise InvalidFileError(f"{path} is of another version of foretrace. Train the judge again.")
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
    hashed = 2 * config.buckets
    rows = 1 if len(config.classes) == 2 else len(config.classes)
    weights = tensors.get("weights")
    width = hashed
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
