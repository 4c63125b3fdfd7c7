"""Build the attributes, goals and methods that a suite defines."""

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
from foretrace.evaluate.suite import AttributePlan, GoalPlan, MethodPlan, Suite
from foretrace.hmm import HMM
from foretrace.lookahead import Lookahead
from foretrace.steering import Goal
from foretrace.vocabulary import tokenizer_settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Row = Mapping[str, Any]
LookaheadKey = tuple[str, int]  # an attribute expression and a horizon


def fill_template(template: str, row: Row) -> str:
    """Replace `{column}` in a template by the values of a prompt's row."""
    try:
        return template.format_map(row)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise InvalidInputError(
            f"'{template}' cannot be filled ({reason(error)}): the prompts have the columns "
            f"{', '.join(map(str, row))}. Write {{{{ and }}}} for braces."
        ) from error


def attribute_identity(attribute: Attribute) -> str:
    """Return a checksum of an attribute's tensors."""
    terms = attribute.terms
    return _io.checksums([terms.coefficients, terms.tokens, terms.log_weights])


def fit_attributes(
    suite: Suite, data: Path, folder: Path, tokenizer: "PreTrainedTokenizerBase"
) -> AttributeStore:
    """Fit the suite's attributes; those that were fitted by the same plan before are kept."""
    settings = tokenizer_settings(tokenizer.get_vocab())
    store = AttributeStore(folder, tokenizer_fingerprint=settings["tokenizer_fingerprint"])
    for name, plan in suite.attributes.items():
        plan_file = folder / f".{name}.plan.json"
        rows = plan.rows(data)
        plan_content = {**asdict(plan), "transform": list(plan.transform)}
        inputs = {"plan": plan_content, "rows": rows_identity(rows), **settings}
        if plan_file.is_file() and _io.read_json(plan_file) == inputs:
            continue
        plan_file.unlink(missing_ok=True)
        for attribute in _fit(name, plan, rows, tokenizer, settings):
            store.add(attribute)
        _io.write_json(plan_file, inputs)
    return store


def rows_identity(rows: Sequence[Row]) -> str:
    """Return a checksum of the content of rows."""
    content = json.dumps(rows, sort_keys=True, default=str).encode("utf-8", "surrogatepass")
    return hashlib.sha256(content).hexdigest()


def _fit(
    name: str,
    plan: AttributePlan,
    rows: Sequence[Row],
    tokenizer: "PreTrainedTokenizerBase",
    settings: Mapping[str, Any],
) -> Iterator[Attribute]:
    """Fit one attribute to scores, or one for each label."""
    windows = tokenize([row[plan.text] for row in rows], tokenizer)
    common = {"groups": windows.texts, "source": {"data": plan.file}, **settings}
    if plan.by is not None:
        labels = [str(rows[text][plan.by]) for text in windows.texts]
        config = FitConfig(objective=plan.objective, terms=plan.terms, by_absence=True)
        yield from Attribute.fit_each(windows.token_ids, labels, config=config, **common)
        return
    scores = [_planned_score(rows[text], plan) for text in windows.texts]
    config = FitConfig(objective=plan.objective, terms=plan.terms, transform=plan.affine)
    yield Attribute.fit(windows.token_ids, scores, config=config, name=name, **common)


def _planned_score(row: Row, plan: AttributePlan) -> float:
    if plan.score is None or row.get(plan.score) is None:
        raise InvalidFileError(
            f"{plan.file}: a row has no '{plan.score}'. Set `score: COLUMN` or `by: COLUMN`."
        )
    score = to_score(row[plan.score], plan.equals)
    return 1 - score if plan.invert else score


def to_score(value: Any, equals: Any) -> float:
    """Convert a value to a score; with `equals`, to 1 if it is that value and otherwise to 0."""
    return float(value) if equals is None else float(value == equals)


def lm_identity(lm: "PreTrainedModel") -> str:
    """Return the dtype of a language model and a checksum of four of its parameters."""
    parameters = [parameter for _, parameter in sorted(lm.named_parameters())]
    return f"{lm.dtype}-{_io.checksums([*parameters[:2], *parameters[-2:]])}"


@dataclass
class MethodBuilder:
    """Builds methods for the prompts of a suite; equal goals are one object."""

    hmm: HMM
    store: AttributeStore
    prompts: Sequence[Row]
    text_column: str
    _attributes: dict[str, Attribute] = field(default_factory=dict)
    _lookaheads: dict[LookaheadKey, Lookahead] = field(default_factory=dict)
    _goals: dict[tuple[GoalPlan, LookaheadKey, bool], Goal] = field(default_factory=dict)

    def method(self, name: str, plan: MethodPlan) -> Method:
        """Build a method: the goals, instruction and selection attribute of every prompt."""
        goals = inputs = None
        if plan.goals:
            goals = [
                [self._goal(goal, plan.horizon, plan.neutral_end, row) for goal in plan.goals]
                for row in self.prompts
            ]
        if plan.instruction is not None:
            inputs = self.fill(plan.instruction)
        best_by = [self.attribute(plan.best_by, row) for row in self.prompts if plan.best_by]
        return Method(name, goals, inputs, plan.best_of, best_by)

    def fill(self, template: str) -> list[str]:
        """Fill a template with every prompt and the columns of its row."""
        return [
            fill_template(template, {**row, "prompt": row[self.text_column]})
            for row in self.prompts
        ]

    def attribute(self, expression: str, row: Row) -> Attribute:
        """Build the attribute of an expression for a prompt's row."""
        text = fill_template(expression, row)
        if text not in self._attributes:
            self._attributes[text] = parse(text).build(self.store)
        return self._attributes[text]

    def _goal(self, plan: GoalPlan, horizon: int, neutral_end: bool, row: Row) -> Goal:
        filled = GoalPlan(fill_template(plan.of, row), plan.strength, plan.shift)
        key = (filled.of, horizon)
        if key not in self._lookaheads:
            self._lookaheads[key] = Lookahead(self.hmm, self.attribute(plan.of, row), horizon)
        if (filled, key, neutral_end) not in self._goals:
            self._goals[filled, key, neutral_end] = Goal(
                self._lookaheads[key], filled.strength, filled.shift, neutral_end
            )
        return self._goals[filled, key, neutral_end]
