"""What candidates are held against: two attributes, and what control of them is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from foretrace.attribute import LogitAffine
from foretrace.evaluate import metrics


@dataclass(frozen=True)
class Task:
    """An attribute, and what control of it is."""

    name: str
    train: str
    validation: str
    text: str
    score: Callable[[dict[str, Any]], float]
    """Of lacking the attribute that is steered toward, or, if absent, of having it."""
    transform: LogitAffine
    absent: bool
    prompts: str
    judge: str
    label: str
    figure: Callable[[Any], metrics.Measurement]
    horizon: int
    points: Sequence[tuple[float, float]]


TASKS = (
    Task(
        "detox-hard",
        "detox/train.jsonl.xz",
        "detox/validation.jsonl.xz",
        "text",
        lambda row: float(row["toxicity"]),
        LogitAffine(10.0, -10.0),
        False,
        "detox/test_prompts_toxic.jsonl.xz",
        "toxicity",
        "1",
        metrics.average_maximum,
        3,
        ((10.0, -31.0), (20.0, -63.0)),
    ),
    Task(
        "politics",
        "politics/train.jsonl.xz",
        "politics/test.jsonl.xz",
        "description",
        lambda row: float(row["category"] == "POLITICS"),
        LogitAffine(),
        True,
        "detox/test_prompts_nontoxic.jsonl.xz",
        "politics",
        "politics",
        metrics.mean_score,
        19,
        ((2.0, 0.0), (4.0, 0.0)),
    ),
)


@dataclass(frozen=True)
class Candidate:
    """A way to know more, or to say more."""

    name: str
    look: str = "filter"
    phrases: int = 0
    states: bool = False
    steers: bool = True
    """Texts are written by it; of some, only what they know and say is looked at."""


CANDIDATES = (
    Candidate("as served"),
    Candidate("LM evidence, half a step", "half"),
    Candidate("LM evidence, two steps", "two", steers=False),
    Candidate("context head, the HMM as it is", "head", steers=False),
    Candidate("context head, trained jointly", "joint"),
    Candidate("state weights", states=True),
    Candidate("100 phrases", phrases=100, steers=False),
    Candidate("300 phrases", phrases=300),
    Candidate("300 phrases, LM evidence, half a step", "half", 300),
)
