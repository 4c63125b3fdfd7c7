"""From a suite's plans to what can run: attributes fitted, goals and methods built."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretrace import _io
from foretrace.attribute import Attribute, AttributeStore, FitConfig, parse, tokenize
from foretrace.errors import InvalidFileError, InvalidInputError, reason
from foretrace.evaluate.generations import Method
from foretrace.evaluate.suite import Fitting, MethodPlan, Steer, Suite
from foretrace.hmm import HMM
from foretrace.lookahead import Lookahead
from foretrace.steering import Goal
from foretrace.vocabulary import tokenizer_settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Row = Mapping[str, Any]
Place = tuple[str, int]  # an expression, and its horizon


def fill(template: str, row: Row) -> str:
    """Put what a prompt's row holds into a template."""
    try:
        return template.format_map(row)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise InvalidInputError(
            f"'{template}' cannot be filled ({reason(error)}): the prompts have "
            f"{', '.join(map(str, row))}. Write {{{{ and }}}} for braces."
        ) from error


def identity(attribute: Attribute) -> str:
    """Name an attribute by its numbers."""
    terms = attribute.terms
    return _io.checksums([terms.coefficients, terms.tokens, terms.log_weights])


def fit_attributes(
    suite: Suite, data: Path, folder: Path, tokenizer: "PreTrainedTokenizerBase"
) -> AttributeStore:
    """Fit what the suite steers by; what was fitted before, by the same plan, is kept."""
    settings = tokenizer_settings(tokenizer.get_vocab())
    store = AttributeStore(folder, tokenizer_fingerprint=settings["tokenizer_fingerprint"])
    for name, plan in suite.attributes.items():
        note = folder / f".{name}.plan.json"
        rows = plan.rows(data)
        planned = {**asdict(plan), "transform": list(plan.transform)}
        known = {"plan": planned, "rows": rows_identity(rows), **settings}
        if note.is_file() and _io.read_json(note) == known:
            continue
        note.unlink(missing_ok=True)
        for attribute in _fitted(name, plan, rows, tokenizer, settings):
            store.add(attribute)
        _io.write_json(note, known)
    return store


def rows_identity(rows: Sequence[Row]) -> str:
    """Name rows by what they hold."""
    content = json.dumps(rows, sort_keys=True, default=str).encode("utf-8", "surrogatepass")
    return hashlib.sha256(content).hexdigest()


def _fitted(
    name: str,
    plan: Fitting,
    rows: Sequence[Row],
    tokenizer: "PreTrainedTokenizerBase",
    settings: Mapping[str, Any],
) -> Iterator[Attribute]:
    windows = tokenize([row[plan.text] for row in rows], tokenizer)
    common = {"groups": windows.texts, "source": {"data": plan.file}, **settings}
    if plan.by is not None:
        labels = [str(rows[text][plan.by]) for text in windows.texts]
        config = FitConfig(objective=plan.objective, terms=plan.terms, by_absence=True)
        yield from Attribute.fit_each(windows.token_ids, labels, config=config, **common)
        return
    scores = [_score(rows[text], plan) for text in windows.texts]
    config = FitConfig(objective=plan.objective, terms=plan.terms, transform=plan.affine)
    yield Attribute.fit(windows.token_ids, scores, config=config, name=name, **common)


def _score(row: Row, plan: Fitting) -> float:
    if plan.score is None or row.get(plan.score) is None:
        raise InvalidFileError(
            f"{plan.file}: a row has no '{plan.score}'. Say `score: COLUMN` or `by: COLUMN`."
        )
    score = as_score(row[plan.score], plan.equals)
    return 1 - score if plan.invert else score


def as_score(value: Any, equals: Any) -> float:
    """Read a score; where one value is named, having it counts as 1 and another as 0."""
    return float(value) if equals is None else float(value == equals)


def lm_identity(lm: "PreTrainedModel") -> str:
    """Name a language model by its dtype and its numbers: a few tables tell it from others."""
    parts = [part for _, part in sorted(lm.named_parameters())]
    return f"{lm.dtype}-{_io.checksums([*parts[:2], *parts[-2:]])}"


@dataclass
class Builder:
    """Builds methods for the prompts of a suite; equal goals are one object."""

    hmm: HMM
    attributes: AttributeStore
    prompts: Sequence[Row]
    text: str
    """The column of the prompts themselves."""
    _known: dict[str, Attribute] = field(default_factory=dict)
    _lookaheads: dict[Place, Lookahead] = field(default_factory=dict)
    _goals: dict[tuple[Steer, Place, bool], Goal] = field(default_factory=dict)

    def method(self, name: str, plan: MethodPlan) -> Method:
        """Build a method: what it steers by, is told, and chooses by, prompt by prompt."""
        goals = instructed = None
        if plan.goals:
            goals = [
                [self._goal(steer, plan.horizon, plan.neutral_end, row) for steer in plan.goals]
                for row in self.prompts
            ]
        if plan.instruction is not None:
            instructed = self.filled(plan.instruction)
        best_by = [self.attribute(plan.best_by, row) for row in self.prompts if plan.best_by]
        return Method(name, goals, instructed, plan.best_of, best_by)

    def filled(self, template: str) -> list[str]:
        """Put every prompt, and what else its row holds, into a template."""
        return [fill(template, {**row, "prompt": row[self.text]}) for row in self.prompts]

    def attribute(self, expression: str, row: Row) -> Attribute:
        """Build an expression for a prompt."""
        text = fill(expression, row)
        if text not in self._known:
            self._known[text] = parse(text).build(self.attributes)
        return self._known[text]

    def _goal(self, steer: Steer, horizon: int, neutral_end: bool, row: Row) -> Goal:
        own = Steer(fill(steer.of, row), steer.strength, steer.shift)
        place = (own.of, horizon)
        if place not in self._lookaheads:
            self._lookaheads[place] = Lookahead(self.hmm, self.attribute(steer.of, row), horizon)
        if (own, place, neutral_end) not in self._goals:
            self._goals[own, place, neutral_end] = Goal(
                self._lookaheads[place], own.strength, own.shift, neutral_end
            )
        return self._goals[own, place, neutral_end]
