"""Judges: whatever gives a text the probability that it has an attribute.

A judgement that fails is left out and counted. It is never taken for a score.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from foretrace import _io
from foretrace.errors import ForetraceError, InvalidFileError, InvalidInputError, reason
from foretrace.evaluate import linear_judge

BATCH = 32
MOST_IN_VAIN = 5
Score = float | None
Observe = Callable[[int, int], None]


class JudgeRefusedError(ForetraceError):
    """A judge that will not answer, whatever it is asked."""


@dataclass(frozen=True)
class Judge:
    """A named function from texts to scores in [0, 1]; None where it has no answer."""

    name: str
    """Judgements of one text by judges of two names are two judgements."""
    score: Callable[[list[str]], Sequence[Score]]


class Judgements(NamedTuple):
    """The scores of texts, None where judging failed, and why it last did."""

    scores: list[Score]
    last_failure: str | None

    @property
    def failed(self) -> int:
        """How many texts have no score."""
        return sum(score is None for score in self.scores)


def load_judge(
    source: str,
    *,
    label: str | None = None,
    zero_shot: bool = False,
    device: str = "cpu",
    encoder: str | None = None,
) -> Judge:
    """Load a judge: `module:function`, one that `foretrace judge train` wrote, or a classifier.

    Those that know classes give the probability of `label`; a classifier is one of transformers, by
    folder or hub id. With `zero_shot` it is a model of entailment, and the label may be any words
    ("politics").

    A judge of `foretrace judge train` that uses embeddings needs `encoder`, the sentence encoder to
    load: the one that its file names is not loaded on the file's word. Other judges ignore it.
    """
    module, colon, function = source.partition(":")
    if colon and all(part.isidentifier() for part in (*module.split("."), function)):
        return Judge(source, _imported(module, function))
    if (Path(source) / linear_judge.CONFIG).is_file():
        trained = linear_judge.LinearJudge.load(Path(source), encoder=encoder)
        return Judge(f"{trained.identity} {label}", trained.scorer(label))
    if label is None:
        raise InvalidInputError(
            f"The judge '{source}' needs a label: which of its classes, or with zero-shot which "
            f"words, stand for the attribute? (A Python function is given as module:function.)"
        )
    task = "zero-shot-classification" if zero_shot else "text-classification"
    pipeline = _pipeline(task, source, device)
    score = _zero_shot(pipeline, label) if zero_shot else _classes(pipeline, label, source)
    known = str(Path(source).resolve()) if Path(source).is_dir() else source
    return Judge(json.dumps([task, known, label]), score)


def judge_texts(
    texts: Sequence[str],
    judge: Judge,
    *,
    cache: Path | None = None,
    batch_size: int = BATCH,
    observe: Observe = lambda done, total: None,
) -> Judgements:
    """Score all texts, a batch at a time; what the cache file holds already is not judged again.

    A judge that scores nothing for several batches in a row is out of order, and it is an error to
    go on; what was judged is kept.
    """
    known = {} if cache is None else _remembered(cache)
    keys = [hashlib.sha256(f"{judge.name}\0{text}".encode()).hexdigest() for text in texts]
    each = {key: text for key, text in zip(keys, texts, strict=True) if key not in known}
    wanted, failure, in_vain = list(each.items()), None, 0
    for start in range(0, len(wanted), batch_size):
        batch = wanted[start : start + batch_size]
        scores, why = _judge_batch(judge, [text for _, text in batch])
        failure = why or failure
        judged = zip(batch, scores, strict=True)
        found = {key: float(score) for (key, _), score in judged if score is not None}
        known |= found
        if cache is not None:
            _io.append_lines(cache, [{"key": key, "score": found[key]} for key in found])
        observe(start + len(batch), len(wanted))
        in_vain = 0 if found else in_vain + 1
        if in_vain == MOST_IN_VAIN:
            raise InvalidInputError(
                f"The judge '{judge.name}' has scored none of the last {in_vain} batches "
                f"({failure}). It must give a number in [0, 1] for each text; once it does, run "
                f"this again."
            )
    return Judgements([known.get(key) for key in keys], failure)


def _remembered(cache: Path) -> dict[str, float]:
    """Read judgements; refuse a file that holds something else."""
    found: dict[str, float] = {}
    for row in _io.read_lines(cache):
        score = row.get("score") if isinstance(row, dict) else None
        if not isinstance(score, float) or not 0 <= score <= 1 or "key" not in row:
            raise InvalidFileError(
                f"{cache} is not a file of judgements. Name another one to keep them in."
            )
        found[row["key"]] = score
    return found


def _judge_batch(judge: Judge, texts: list[str]) -> tuple[list[Score], str | None]:
    """Judge a batch; if it fails, one text after the other, so that one does not fail them all."""
    try:
        scores = list(judge.score(texts))
        if len(scores) != len(texts):
            raise InvalidInputError(f"{len(scores)} scores came back for {len(texts)} texts")
        judged = [score if _is_probability(score) else None for score in scores]
        wrong = next((score for score in scores if not _is_probability(score)), 0.0)
        return judged, None if None not in judged else f"a score of {wrong} is not in [0, 1]"
    except JudgeRefusedError:
        raise
    except Exception as error:  # a judge is others' code, and may raise anything
        if len(texts) == 1:
            return [None], reason(error)
    alone = [_judge_batch(judge, [text]) for text in texts]
    failures = [why for _, why in alone if why]
    return [scores[0] for scores, _ in alone], failures[-1] if failures else None


def _is_probability(score: Score) -> bool:
    return score is not None and 0 <= score <= 1  # NaN is not


def _imported(module: str, function: str) -> Callable[[list[str]], Sequence[Score]]:
    try:
        found: Callable[[list[str]], Sequence[Score]] = getattr(import_module(module), function)
    except Exception as error:  # importing runs others' code, which may raise anything
        raise InvalidInputError(
            f"The judge {module}:{function} cannot be imported ({reason(error)}). Give a module "
            f"that Python finds (see PYTHONPATH), and a function in it from texts to scores."
        ) from error
    return found


def _pipeline(task: str, source: str, device: str) -> Any:
    try:
        from transformers import pipeline
    except ImportError as error:
        raise InvalidInputError(
            "Judges of transformers need it installed: pip install 'foretrace[transformers]'."
        ) from error
    try:
        return pipeline(  # type: ignore[call-overload]
            task, model=source, device=device, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise InvalidInputError(
            f"The judge '{source}' cannot be loaded for {task} ({reason(error)}). Give the folder "
            f"or the hub id of such a model; check the spelling and the network."
        ) from error


def _classes(pipeline: Any, label: str, source: str) -> Callable[[list[str]], Sequence[Score]]:
    names = list(pipeline.model.config.id2label.values())
    if label not in names:
        raise InvalidInputError(
            f"The judge '{source}' has no class '{label}'; it has {', '.join(map(str, names))}."
        )

    def score(texts: list[str]) -> list[Score]:
        found = pipeline(texts, top_k=None, truncation=True, batch_size=len(texts))
        return [next(one["score"] for one in each if one["label"] == label) for each in found]

    return score


def _zero_shot(pipeline: Any, label: str) -> Callable[[list[str]], Sequence[Score]]:
    if pipeline.entailment_id == -1:
        names = ", ".join(map(str, pipeline.model.config.id2label.values()))
        raise InvalidInputError(
            f"The judge knows {names}, but a judge without training for its label must know "
            f"entailment. Give a model of natural language inference."
        )

    def score(texts: list[str]) -> list[Score]:
        found = pipeline(texts, candidate_labels=[label], multi_label=True, batch_size=len(texts))
        return [each["scores"][0] for each in found]

    return score
