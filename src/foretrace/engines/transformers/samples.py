"""Texts that a language model samples, to fit attributes to.

A classifier of whole texts scores them. The rewards of an attribute then follow from the words that
the language model chooses among, in the contexts of the prompts, and not only from the words of the
user's texts.
"""

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from foretrace import _io
from foretrace.attribute import tokenize
from foretrace.attribute.fitting.examples import Examples
from foretrace.attribute.fitting.split import Split
from foretrace.attribute.token_ids import Texts
from foretrace.chat import Prompt
from foretrace.engines import writing
from foretrace.engines.prompts import decode_after, start_ids
from foretrace.engines.transformers.calibration import OnStage, silent, write_openings
from foretrace.engines.transformers.generation import stop_tokens
from foretrace.engines.transformers.hidden_states import lm_identity
from foretrace.engines.transformers.judged_runs import fit_judge
from foretrace.engines.transformers.text_classifier import (
    Floats,
    TextClassifier,
    are_enough,
    mean_states,
)
from foretrace.engines.transformers.writer import LMWriter
from foretrace.errors import InvalidFileError, InvalidInputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

COPIES = 5  # samples that continue a prompt
NUM_TEXTS, NUM_TOKENS = 3000, 20  # more texts help little, and longer ones teach less per token


class SampledText(NamedTuple):
    """A text that an LM sampled, and the prompt that it continues."""

    text: str
    prompt: Prompt


def sample_texts(
    writer: LMWriter,
    prompts: Sequence[Prompt],
    file: str | PathLike[str],
    *,
    count: int,
    seed: int = 0,
    on_progress: OnStage = silent,
) -> list[SampledText]:
    """Have an LM continue prompts; without prompts, openings that it writes.

    Args:
        writer: The LM.
        prompts: Texts and chats.
        file: The file that keeps what is written, so that an interrupted call continues.
        count: The number of texts.
        seed: The random seed.
        on_progress: Called with stage, done, total and unit.

    Returns:
        The texts that are not blank, those of short prompts first.
    """
    prompts = list(prompts)[:count] or _openings(writer, -(-count // COPIES), seed)
    copies = -(-count // len(prompts))
    # Prompts of one length need no padding, which the LM would read too.
    prompts.sort(key=lambda prompt: len(str(prompt)))
    repeated = [prompt for prompt in prompts for _ in range(copies)]
    written = writing.write_texts(
        writer,
        repeated,
        file,
        seed=seed,
        on_progress=lambda done, total: on_progress("sample", done, total, "texts"),
    )
    pairs = zip(repeated, written, strict=True)
    return [SampledText(text, prompt) for prompt, (text, _) in pairs if text.strip()]


def _openings(writer: LMWriter, count: int, seed: int) -> list[Prompt]:
    """Have the LM write the first tokens of texts."""
    model, tokenizer = writer.model, writer.tokenizer
    start = start_ids(tokenizer, writer.ends)
    ends = stop_tokens(model.generation_config, start)
    openings = write_openings(model, start, ends=ends, count=count, seed=seed)
    return [decode_after(tokenizer, start, ids[len(start) :]) for ids in openings]


@dataclass(frozen=True)
class TeachingSamples:
    """Samples of an LM with their mean hidden states. Attributes of the LM share them.

    Attributes:
        texts: The token ids of the texts.
        states: The mean hidden state of each in a middle layer, (n, d).

    Example:
        >>> from foretrace.engines.transformers.samples import TeachingSamples
        >>> samples = TeachingSamples.draw(model, tokenizer, folder / "samples.jsonl", count=10)
        >>> len(samples.texts)
        10
    """

    texts: Texts
    states: Floats

    @classmethod
    def draw(
        cls,
        lm: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase",
        file: str | PathLike[str],
        *,
        prompts: Sequence[Prompt] = (),
        ends: Sequence[int] = (),
        count: int = NUM_TEXTS,
        seed: int = 0,
        on_progress: OnStage = silent,
    ) -> "TeachingSamples":
        """Sample texts at temperature 1, and read them.

        Args:
            lm: A causal LM of transformers.
            tokenizer: Its tokenizer.
            file: The file that keeps what is written, so that an interrupted call continues. A
                file beside it keeps the states.
            prompts: Texts and chats to continue. By default, openings that the LM writes.
            ends: Tokens that end a text, besides the LM's own.
            count: The number of texts.
            seed: The random seed.
            on_progress: Called with stage, done, total and unit.
        """
        writer = LMWriter(lm, tokenizer, f"{lm_identity(lm)}, samples", ends, NUM_TOKENS, 1.0)
        drawn = sample_texts(writer, prompts, file, count=count, seed=seed, on_progress=on_progress)
        texts = [one.text for one in drawn]
        states = _kept_states(lm, tokenizer, texts, Path(file), on_progress)
        return cls(tokenize(texts, tokenizer, window=4 * NUM_TOKENS).token_ids, states)

    def scored(self, teacher: TextClassifier) -> tuple[Texts, list[float]]:
        """Return the texts with their scores, as `Attribute.fit` takes them."""
        return self.texts, teacher.score_states(self.states)


def _kept_states(
    lm: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    texts: Sequence[str],
    samples: Path,
    on_progress: OnStage,
) -> Floats:
    """Compute the mean states of samples, unless the file beside them has the states."""
    file = samples.with_suffix(".states")  # no name of an attribute
    content = json.dumps([lm_identity(lm), *texts])
    key = hashlib.sha256(content.encode()).hexdigest()
    with suppress(InvalidFileError):  # missing or damaged: the states are computed again
        tensors, metadata = _io.read_tensors(file)
        if metadata.get("key") == key:
            return tensors["states"].double().numpy()
    states = torch.from_numpy(
        mean_states(
            lm, tokenizer, texts, lambda done, total: on_progress("read", done, total, "texts")
        )
    ).float()
    _io.write_tensors(file, {"states": states}, {"key": key})
    return states.double().numpy()


class Classifiers(NamedTuple):
    """Classifiers of whole texts that were fitted to one half each of an attribute's texts.

    Attributes:
        teacher: Scores samples, which rewards are fitted to. None if it cannot be trusted.
        judge: Judges steered texts. None if there are too few texts.
    """

    teacher: TextClassifier | None
    judge: TextClassifier | None

    @classmethod
    def fit(
        cls,
        lm: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase",
        texts: Sequence[str],
        scores: Sequence[float],
        *,
        on_progress: OnStage = silent,
    ) -> "Classifiers":
        """Fit both. Near duplicates are in the same half.

        A judge that had taught the rewards would find its own errors in the steered texts.
        """
        halves = _halves(tokenizer, texts, scores)
        if halves is None:
            return cls(None, fit_judge(lm, tokenizer, texts, scores, on_progress))
        teacher, judge = (fit_judge(lm, tokenizer, *half, on_progress) for half in halves)
        return cls(_trusted(teacher), judge)


def fit_teacher(
    lm: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    texts: Sequence[str],
    scores: Sequence[float],
) -> TextClassifier | None:
    """Fit the teacher of `Classifiers` without the judge, in half the time.

    Args:
        lm: A causal LM of transformers.
        tokenizer: Its tokenizer.
        texts: The texts of an attribute.
        scores: Their scores.

    Returns:
        The teacher; None if it cannot be trusted, or there are too few texts for teacher and judge.
    """
    halves = _halves(tokenizer, texts, scores)
    return None if halves is None else _trusted(fit_judge(lm, tokenizer, *halves[0]))


def _trusted(teacher: TextClassifier | None) -> TextClassifier | None:
    return teacher if teacher is not None and teacher.is_trusted else None


def _halves(
    tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str], scores: Sequence[float]
) -> list[tuple[list[str], list[float]]] | None:
    """Divide texts and scores into two halves, near duplicates together; None if too few."""
    windows = tokenize(texts, tokenizer)
    window_scores = [scores[text] for text in windows.texts]
    vocab_size = max(int(max(ids)) for ids in windows.token_ids) + 1
    examples = Examples.from_scores(windows.token_ids, window_scores, vocab_size, windows.texts)
    try:
        split = Split.of(examples, None, 0.5, 0)
    except InvalidInputError:  # too few texts
        return None
    members = [sorted(set(part.groups.tolist())) for part in (split.fitting, split.held_out)]
    halves = [([texts[i] for i in half], [scores[i] for i in half]) for half in members]
    return halves if all(are_enough(*half) for half in halves) else None
