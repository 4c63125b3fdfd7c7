"""Judges: functions that score texts with the probability that they have an attribute.

A judgement that fails is left out and counted. It is never a score.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from foretrace import _http, _io
from foretrace.errors import (
    InvalidFileError,
    InvalidInputError,
    ServerError,
    ServerUnavailableError,
    reason,
)
from foretrace.evaluate import linear_judge
from foretrace.evaluate.plugin import import_function, is_function_name

BATCH = 32
MAX_FAILED_BATCHES = 5
PERSPECTIVE = "https://commentanalyzer.googleapis.com/v1alpha1/comments:analyze"
PERSPECTIVE_KEY = "PERSPECTIVE_API_KEY"
Score = float | None
OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class Judge:
    """A named function from texts to scores.

    Attributes:
        name: The name under which judgements are cached. Two judges that may give different scores
            need different names.
        score: A function from a list of texts to a score in [0, 1] for each; None where it has no
            answer.

    Example:
        >>> from foretrace.evaluate import Judge
        >>> judge = Judge("length", lambda texts: [min(1, len(text) / 10) for text in texts])
        >>> judge.score(["abcde"])
        [0.5]
    """

    name: str
    score: Callable[[list[str]], Sequence[Score]]


class Judgements(NamedTuple):
    """The scores of texts.

    Attributes:
        scores: A score for each text; None where judging failed.
        last_failure: The reason of the last failure, or None.
    """

    scores: list[Score]
    last_failure: str | None

    @property
    def failed(self) -> int:
        """The number of texts without a score."""
        return sum(score is None for score in self.scores)


def load_judge(
    source: str | os.PathLike[str],
    *,
    label: str | None = None,
    zero_shot: bool = False,
    device: str = "cpu",
    encoder: str | os.PathLike[str] | None = None,
) -> Judge:
    """Load a judge.

    Args:
        source: `module:function`, a folder that `foretrace judge train` wrote, or a transformers
            classifier by folder or hub id.
        label: The class whose probability is the score. A judge of `foretrace judge train` with two
            classes does not need it. With `zero_shot`, any words ("politics").
        zero_shot: Whether the classifier is a natural language inference model.
        device: The device of a classifier.
        encoder: The sentence encoder of a folder that `foretrace judge train` wrote with one. The
            encoder that its file names is not loaded on the file's word. Other judges ignore it.

    Returns:
        The judge.

    Raises:
        InvalidInputError: If the source cannot be loaded, or a label or an encoder is missing.
        InvalidFileError: If the files of the folder are malformed.

    Example:
        >>> from foretrace.evaluate import load_judge
        >>> from foretrace.evaluate.linear_judge import LinearJudge
        >>> LinearJudge.train(["you fool", "thank you"], ["1", "0"]).save(folder / "rude")
        >>> load_judge(folder / "rude").score(["you fool"])[0] > 0.5
        True
    """
    source = os.fspath(source)
    if is_function_name(source):
        return Judge(source, import_function(source, "judge", "from texts to scores"))
    if (Path(source) / linear_judge.CONFIG).is_file():
        linear = linear_judge.LinearJudge.load(source, encoder=encoder)
        return Judge(f"{linear.identity} {label}", linear.scorer(label))
    if label is None:
        raise InvalidInputError(
            f"The judge '{source}' needs a label: the class, or with zero-shot the words, that "
            f"stand for the attribute. (To use a Python function, pass module:function.)"
        )
    task = "zero-shot-classification" if zero_shot else "text-classification"
    pipeline = _load_pipeline(task, source, device)
    if zero_shot:
        score = _zero_shot_scorer(pipeline, label)
    else:
        score = _class_scorer(pipeline, label, source)
    model = str(Path(source).resolve()) if Path(source).is_dir() else source
    return Judge(json.dumps([task, model, label]), score)


def judge_texts(
    texts: Sequence[str],
    judge: Judge,
    *,
    cache: str | os.PathLike[str] | None = None,
    batch_size: int = BATCH,
    on_progress: OnProgress = lambda done, total: None,
) -> Judgements:
    """Score texts in batches, without those whose score is cached.

    Args:
        texts: The texts. Equal texts are judged once.
        judge: The judge.
        cache: A file of JSON lines that holds scores and is appended to after every batch.
        batch_size: The number of texts that the judge gets at a time.
        on_progress: Called after each batch with the number of texts judged, and of texts to judge.

    Returns:
        A score for each text; None where judging failed.

    Raises:
        InvalidInputError: If the judge scores no text of five batches in a row. Scores up to there
            are in the cache.
        InvalidFileError: If the cache is a file of something else.
        ServerUnavailableError: If the server of a judge cannot be reached, or refuses every
            request. Scores up to there are in the cache.

    Example:
        >>> from foretrace.evaluate import Judge, judge_texts
        >>> shout = Judge("shout", lambda texts: [float(text.isupper()) for text in texts])
        >>> judge_texts(["HELLO", "hello"], shout, cache=folder / "scores.jsonl").scores
        [1.0, 0.0]
    """
    cache = None if cache is None else Path(cache)
    scores = {} if cache is None else _read_cache(cache)
    keys = [hashlib.sha256(f"{judge.name}\0{text}".encode()).hexdigest() for text in texts]
    missing = {key: text for key, text in zip(keys, texts, strict=True) if key not in scores}
    pending, last_failure, failed_batches = list(missing.items()), None, 0
    for start in range(0, len(pending), batch_size):
        batch = pending[start : start + batch_size]
        batch_scores, failure = _judge_batch(judge, [text for _, text in batch])
        last_failure = failure or last_failure
        new_scores = {
            key: float(score)
            for (key, _), score in zip(batch, batch_scores, strict=True)
            if score is not None
        }
        scores |= new_scores
        if cache is not None:
            rows = [{"key": key, "score": score} for key, score in new_scores.items()]
            _io.append_lines(cache, rows)
        on_progress(start + len(batch), len(pending))
        failed_batches = 0 if new_scores else failed_batches + 1
        if failed_batches == MAX_FAILED_BATCHES:
            raise InvalidInputError(
                f"The judge '{judge.name}' has scored none of the last {failed_batches} batches "
                f"({last_failure}). It must return a number in [0, 1] for each text. Run the same "
                f"command again once it does."
            )
    return Judgements([scores.get(key) for key in keys], last_failure)


def _read_cache(cache: Path) -> dict[str, float]:
    """Read cached scores by key; refuse a file of something else."""
    scores: dict[str, float] = {}
    for row in _io.read_lines(cache):
        score = row.get("score") if isinstance(row, dict) else None
        if not isinstance(score, float) or not 0 <= score <= 1 or "key" not in row:
            raise InvalidFileError(
                f"{cache} is not a file of judgements. Use another file as the cache."
            )
        scores[row["key"]] = score
    return scores


def _judge_batch(judge: Judge, texts: list[str]) -> tuple[list[Score], str | None]:
    """Judge a batch: (scores, reason of a failure); if the judge raises, text by text."""
    try:
        scores = list(judge.score(texts))
        if len(scores) != len(texts):
            raise InvalidInputError(f"{len(scores)} scores came back for {len(texts)} texts")
        invalid = [score for score in scores if not _is_probability(score)]
        valid = [score if _is_probability(score) else None for score in scores]
        wrong = [score for score in invalid if score is not None]
        failure = f"a score of {wrong[0]} is not in [0, 1]" if wrong else "it gave no score"
        return valid, failure if invalid else None
    except ServerUnavailableError:
        raise
    except Exception as error:  # a judge is external code, which may raise anything
        if len(texts) == 1:
            return [None], reason(error)
    results = [_judge_batch(judge, [text]) for text in texts]
    failures = [failure for _, failure in results if failure]
    return [scores[0] for scores, _ in results], failures[-1] if failures else None


def _is_probability(score: Score) -> bool:
    return score is not None and 0 <= score <= 1  # false for NaN


def _load_pipeline(task: str, source: str, device: str) -> Any:
    try:
        from transformers import pipeline
    except ImportError as error:
        raise InvalidInputError(
            "A transformers classifier needs transformers: pip install 'foretrace[transformers]'."
        ) from error
    try:
        return pipeline(  # type: ignore[call-overload]
            task, model=source, device=device, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise InvalidInputError(
            f"The judge '{source}' cannot be loaded for {task} ({reason(error)}). Pass the folder "
            f"or the hub id of such a model; check the spelling and the network."
        ) from error


def _class_scorer(pipeline: Any, label: str, source: str) -> Callable[[list[str]], Sequence[Score]]:
    """Build a function from texts to the probabilities of a classifier's class."""
    names = list(pipeline.model.config.id2label.values())
    if label not in names:
        raise InvalidInputError(
            f"The judge '{source}' has no class '{label}'; it has {', '.join(map(str, names))}."
        )

    def score(texts: list[str]) -> list[Score]:
        outputs = pipeline(texts, top_k=None, truncation=True, batch_size=len(texts))
        return [
            next(class_["score"] for class_ in classes if class_["label"] == label)
            for classes in outputs
        ]

    return score


def _zero_shot_scorer(pipeline: Any, label: str) -> Callable[[list[str]], Sequence[Score]]:
    """Build a function from texts to the probabilities that they entail a label."""
    if pipeline.entailment_id == -1:
        names = ", ".join(map(str, pipeline.model.config.id2label.values()))
        raise InvalidInputError(
            f"The judge has the classes {names}, but zero-shot classification needs a class "
            f"'entailment'. Use a model of natural language inference."
        )

    def score(texts: list[str]) -> list[Score]:
        outputs = pipeline(texts, candidate_labels=[label], multi_label=True, batch_size=len(texts))
        return [output["scores"][0] for output in outputs]

    return score


def perspective_judge(attribute: str = "TOXICITY", requests_per_second: float = 1.0) -> Judge:
    """Build a judge that queries Google's Perspective API, which closes at the end of 2026.

    The key is read from the environment variable `PERSPECTIVE_API_KEY`.

    Args:
        attribute: An attribute of Perspective, such as `TOXICITY` or `INSULT`.
        requests_per_second: The number of requests per second that the key allows.

    Returns:
        The judge.

    Raises:
        InvalidInputError: If the environment variable is not set.
    """
    key = os.environ.get(PERSPECTIVE_KEY)
    if not key:
        raise InvalidInputError(f"Perspective needs a key: set {PERSPECTIVE_KEY} to yours.")
    client = PerspectiveClient(f"{PERSPECTIVE}?key={key}", attribute, 1 / requests_per_second)
    return Judge(f"perspective:{attribute}", client.score)


@dataclass
class PerspectiveClient:
    """A client that sends one text at a time, limits its rate, and retries temporary failures.

    Attributes:
        address: The URL of the API, with the key.
        attribute: The attribute of Perspective whose score is requested.
        pause: The seconds between two requests.
        attempts: The number of attempts for one text.
        timeout: The seconds after which a request fails.
        sleep: The function that waits; tests replace it.

    Example:
        >>> from foretrace.evaluate.judges import PerspectiveClient
        >>> client = PerspectiveClient("http://127.0.0.1:9/", "TOXICITY", 0.0, attempts=1)
        >>> client.score([])
        []
    """

    address: str
    attribute: str
    pause: float
    attempts: int = 6
    timeout: float = 30.0
    sleep: Callable[[float], None] = time.sleep
    _next_request: float = field(default=0.0, init=False)

    def score(self, texts: Sequence[str]) -> list[Score]:
        """Return the scores of texts; None where the API has no answer, as for other languages.

        Raises:
            ServerUnavailableError: If the API cannot be reached, or refuses the key.
        """
        return [self._request_score(text) for text in texts]

    def _request_score(self, text: str) -> Score:
        body = {
            "comment": {"text": text},
            "requestedAttributes": {self.attribute: {}},
            "languages": ["en"],
            "doNotStore": True,
        }
        if (wait := self._next_request - time.monotonic()) > 0:
            self.sleep(wait)
        limits: dict[str, Any] = {"timeout": self.timeout, "attempts": self.attempts}
        try:
            answer = _http.post_json(
                self.address, body, pause=self.pause, sleep=self.sleep, **limits
            )
            return float(answer["attributeScores"][self.attribute]["summaryScore"]["value"])
        except ServerUnavailableError:
            raise
        except (ServerError, KeyError, TypeError, ValueError):  # an answer without a score
            return None
        finally:
            self._next_request = time.monotonic() + self.pause
