"""Runs whose texts are judged: their prompts, and the classifier that judges them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretrace.attribute import Attribute
from foretrace.chat import Prompt
from foretrace.engines.prompts import decode_after, encode_prompts, start_ids, turn_ends
from foretrace.engines.transformers.calibration import (
    NUM_ROWS,
    Continuation,
    OnStage,
    SteeredRuns,
    silent,
    write_openings,
)
from foretrace.engines.transformers.generation import stop_tokens
from foretrace.engines.transformers.text_classifier import TextClassifier
from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TOP_P = 0.9  # of texts that are judged: what people would read
Floats = NDArray[np.float64]


class RunPrompts(NamedTuple):
    """Token ids of prompts, and the tokens that end their continuations."""

    ids: list[list[int]]
    ends: list[int]

    @classmethod
    def encode(
        cls,
        lm: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase",
        hmm: HMM,
        prompts: Sequence[Prompt],
        seed: int,
    ) -> "RunPrompts":
        """Encode prompts; without any, let the LM write openings."""
        prompts = list(prompts)[:NUM_ROWS]
        ends = [*hmm.config.eos_token_ids, *turn_ends(tokenizer, prompts)]
        ends = stop_tokens(lm.generation_config, ends)
        if prompts:
            return cls(encode_prompts(tokenizer, prompts), ends)
        start = start_ids(tokenizer, hmm.config.eos_token_ids)
        return cls(write_openings(lm, start, ends=ends, seed=seed), ends)


class JudgedTexts(NamedTuple):
    """Continuations as texts, their probabilities of the attribute, and means over all tokens."""

    texts: list[str]
    probabilities: Floats
    price: float
    nats: float
    text_nats: Floats  # of each text, per token


@dataclass(frozen=True)
class TextReader:
    """Decodes continuations and judges them."""

    tokenizer: "PreTrainedTokenizerBase"
    attribute: Attribute
    judge: TextClassifier | None
    runs: SteeredRuns

    def read(self, drawn: Sequence[Continuation]) -> JudgedTexts:
        """Decode and judge continuations."""
        texts = [
            decode_after(self.tokenizer, prompt, row.tokens)
            for prompt, row in zip(self.runs.prompts, drawn, strict=True)
        ]
        if self.judge is not None:
            probabilities = np.array(self.judge.score(texts))
        else:
            ends = set(self.runs.ends)
            kept = [[token for token in row.tokens if token not in ends] for row in drawn]
            probabilities = self.attribute.probability(kept).numpy()
        count = sum(len(row.tokens) for row in drawn)
        price, nats = sum(row.price for row in drawn), sum(row.nats for row in drawn)
        each = np.array([row.nats / len(row.tokens) for row in drawn])
        return JudgedTexts(texts, probabilities, price / count, nats / count, each)

    def prompt_text(self, row: int) -> str:
        """Return the prompt of a row as text."""
        return str(self.tokenizer.decode([*self.runs.prompts[row]], skip_special_tokens=True))


def fit_judge(
    lm: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    texts: Sequence[str],
    scores: Sequence[float],
    on_progress: OnStage = silent,
) -> TextClassifier | None:
    """Fit a classifier to the texts of an attribute, to judge steered texts.

    Args:
        lm: A causal LM of transformers.
        tokenizer: Its tokenizer.
        texts: The texts.
        scores: Their scores.
        on_progress: Called with stage, done, total and unit.

    Returns:
        The judge; None if there are too few texts.

    Example:
        >>> from foretrace.engines.transformers.judged_runs import fit_judge
        >>> fit_judge(model, tokenizer, ["you fool", "dear customer"], [0.0, 1.0]) is None
        True
    """
    try:
        return TextClassifier.fit(
            lm,
            tokenizer,
            texts,
            scores,
            on_progress=lambda done, total: on_progress("judge", done, total, "texts"),
        )
    except InvalidInputError:  # too few texts on a side
        return None
