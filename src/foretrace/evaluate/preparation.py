"""Build the attributes, goals and methods that a suite defines."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretrace import _io
from foretrace.attribute import (
    Attribute,
    AttributeStore,
    FitConfig,
    LogitAffine,
    parse,
    tokenize,
    word_tokens,
)
from foretrace.attribute.token_ids import Texts
from foretrace.chat import Prompt, as_messages, render_chat
from foretrace.context import Head, token_embeddings
from foretrace.engines.transformers.samples import TeachingSamples, fit_teacher
from foretrace.errors import InvalidFileError, InvalidInputError, reason
from foretrace.evaluate.continuations import Method
from foretrace.evaluate.suite import AttributePlan, MethodPlan, Suite
from foretrace.hmm import HMM
from foretrace.lookahead.levels import DEFAULT_LEVEL
from foretrace.steering import CompiledGoal, Compiler, Goal
from foretrace.steering.goal_text import describe_goals
from foretrace.vocabulary import tokenizer_settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Row = Mapping[str, Any]


def fill_template(template: str, row: Row) -> str:
    """Replace `{column}` in a template by the values of a prompt's row."""
    try:
        return template.format_map(row)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise InvalidInputError(
            f"'{template}' cannot be filled ({reason(error)}): the prompts have the columns "
            f"{', '.join(map(str, row))}. Write {{{{ and }}}} for braces."
        ) from error


def goal_checksum(goal: CompiledGoal) -> list[str | float]:
    """Return what identifies a goal: its tables, its transforms, and whether ends are neutral."""
    parts: list[str | float] = [goal.neutral_end]
    for factor in goal.factors:
        parts += [factor.key, factor.transform.scale, factor.transform.shift]
    return parts


def fit_attributes(
    suite: Suite,
    data: Path,
    folder: Path,
    lm: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    hmm: HMM,
) -> AttributeStore:
    """Fit the suite's attributes; keep those that were fitted by the same plan before."""
    head = cache(partial(Head.of_model, lm, tokenizer))

    @cache
    def lm_settings() -> dict[str, Any]:
        frequencies = hmm.token_frequencies()
        return {"frequencies": frequencies, "embeddings": token_embeddings(head())}

    settings = tokenizer_settings(tokenizer.get_vocab())
    store = AttributeStore(folder, tokenizer_fingerprint=settings["tokenizer_fingerprint"])
    teacher = _Teacher(lm, tokenizer, hmm, suite, data, folder / ".samples.jsonl")
    for name, plan in suite.attributes.items():
        plan_file = folder / f".{name}.plan.json"
        rows = plan.rows(data)
        plan_content = {**asdict(plan), "transform": plan.transform and list(plan.transform)}
        inputs = {"plan": plan_content, "rows": rows_identity(rows), **settings}
        if plan.uses_lm:
            inputs |= {"hmm": hmm.checksum, "head": head().fingerprint}
        if plan_file.is_file() and _io.read_json(plan_file) == inputs:
            continue
        plan_file.unlink(missing_ok=True)
        used = {**settings, **(lm_settings() if plan.uses_lm else {})}
        if plan.uses_samples:
            used["samples"] = teacher.teach(plan, rows)
        for attribute in _fit(name, plan, rows, tokenizer, used):
            store.add(attribute)
        _io.write_json(plan_file, inputs)
    return store


@dataclass(frozen=True)
class _Teacher:
    """Samples texts of the LM, and scores them by classifiers of the attributes' texts."""

    lm: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    hmm: HMM
    suite: Suite
    data: Path
    file: Path
    _drawn: dict[int, TeachingSamples] = field(default_factory=dict)
    _scored: dict[str, tuple[Texts, list[float]] | None] = field(default_factory=dict)
    """What attributes with equal texts and scores share."""

    def teach(self, plan: AttributePlan, rows: Sequence[Row]) -> tuple[Texts, list[float]] | None:
        """Return samples and their scores; None if the attribute's texts are too few for it."""
        texts, scores = (
            [row[plan.text] for row in rows],
            [_planned_score(row, plan) for row in rows],
        )
        key = rows_identity([{"texts": texts, "scores": scores, "samples": plan.samples}])
        if key not in self._scored:
            teacher = fit_teacher(self.lm, self.tokenizer, texts, scores)
            samples = None if teacher is None else self._samples(plan.samples).scored(teacher)
            self._scored[key] = samples
        return self._scored[key]

    def _samples(self, count: int) -> TeachingSamples:
        if count not in self._drawn:
            self._drawn[count] = TeachingSamples.draw(
                self.lm,
                self.tokenizer,
                self.file,
                prompts=self._prompts(),
                ends=self.hmm.config.eos_token_ids,
                count=count,
            )
        return self._drawn[count]

    def _prompts(self) -> list[Prompt]:
        """Return the prompts for calibration; without any, the LM writes openings."""
        table, template = self.suite.calibration, self.suite.template
        if table is None:
            return []
        texts = [
            fill_template(template, {**row, "prompt": row[table.text]})
            for row in table.rows(self.data)
        ]
        return [as_messages(text, None) if self.suite.chat else text for text in texts]


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
    common = {
        "groups": windows.texts,
        "source": {"data": plan.file},
        "tokenizer": tokenizer,
        **settings,
    }
    if plan.by is not None:
        labels = [str(rows[text][plan.by]) + plan.suffix for text in windows.texts]
        config = _fit_config(plan, tokenizer)
        yield from Attribute.fit_each(windows.token_ids, labels, config=config, **common)
        return
    scores = [_planned_score(rows[text], plan) for text in windows.texts]
    transform = None if plan.transform is None else LogitAffine(*plan.transform)
    config = _fit_config(plan, tokenizer, transform=transform)
    yield Attribute.fit(windows.token_ids, scores, config=config, name=name, **common)


def _fit_config(
    plan: AttributePlan, tokenizer: "PreTrainedTokenizerBase", **settings: Any
) -> FitConfig:
    """Build the settings of a fit; the objective is the default one unless the plan names it."""
    if plan.objective is not None:
        settings["objective"] = plan.objective
    if plan.kept_words:
        settings["keep"] = word_tokens(plan.kept_words, tokenizer)
    return FitConfig(terms=plan.terms, **settings)


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


@dataclass
class MethodBuilder:
    """Builds methods for the prompts of a suite; equal goals are one object."""

    hmm: HMM
    store: AttributeStore
    prompts: Sequence[Row]
    text_column: str
    template: str = "{prompt}"
    """The LM's input, or in a chat the user's message."""
    chat_tokenizer: "PreTrainedTokenizerBase | None" = None
    """The tokenizer whose template writes chats; None if prompts are continued as they are."""
    other_hmms: Mapping[str, HMM] = field(default_factory=dict)
    """The HMMs that methods name."""
    _attributes: dict[str, Attribute] = field(default_factory=dict)
    _goals: dict[Any, CompiledGoal] = field(default_factory=dict)

    def with_prompts(self, prompts: Sequence[Row], text_column: str) -> "MethodBuilder":
        """Return a builder of the same methods for other prompts."""
        return replace(self, prompts=prompts, text_column=text_column, _attributes={}, _goals={})

    def hmm_of(self, plan: MethodPlan) -> HMM:
        """Return the HMM that a method steers with."""
        return self.hmm if plan.hmm is None else self.other_hmms[plan.hmm]

    def method(self, name: str, plan: MethodPlan, factor: float = 1.0) -> Method:
        """Build a method: the goals, instruction and selection attribute of every prompt."""
        goals = self.goals(plan, factor) if plan.goals else None
        inputs = None if plan.instruction is None else self.inputs(plan.instruction)
        best_by = [self.attribute(plan.best_by, row) for row in self.prompts if plan.best_by]
        return Method(name, goals, inputs, plan.best_of, best_by)

    def goals(self, plan: MethodPlan, factor: float = 1.0) -> list[CompiledGoal]:
        """Build the goal of every prompt; strengths are multiplied by a factor."""
        goals = []
        for row in self.prompts:
            expressions = tuple(fill_template(goal, row) for goal in plan.goals)
            key = (expressions, replace(plan, goals=()), factor)
            if key not in self._goals:
                self._goals[key] = self._build_goals(expressions, plan, factor)
            goals.append(self._goals[key])
        return goals

    def inputs(self, instruction: str | None = None) -> list[str]:
        """Return the LM's input for every prompt; an instruction is a chat's system message."""
        if self.chat_tokenizer is None:
            return self.fill(self.template if instruction is None else instruction)
        messages = self.fill(self.template)
        systems = [None] * len(messages) if instruction is None else self.fill(instruction)
        return [
            render_chat(self.chat_tokenizer, as_messages(message, system))
            for message, system in zip(messages, systems, strict=True)
        ]

    def fill(self, template: str) -> list[str]:
        """Fill a template with every prompt and the columns of its row."""
        return [
            fill_template(template, {**row, "prompt": row[self.text_column]})
            for row in self.prompts
        ]

    def attribute(self, expression: str, row: Row) -> Attribute:
        """Build the attribute of an expression for a prompt's row."""
        return self._attribute(fill_template(expression, row))

    def _attribute(self, expression: str) -> Attribute:
        if expression not in self._attributes:
            self._attributes[expression] = parse(expression).build(self.store)
        return self._attributes[expression]

    def _build_goals(
        self, expressions: Sequence[str], plan: MethodPlan, factor: float
    ) -> CompiledGoal:
        """Compile the conjunction of the expressions, or a goal for each transform."""
        compiler = Compiler(self.hmm_of(plan), plan.horizon, memory=0)
        parsed = [parse(expression) for expression in expressions]
        if plan.transform is not None:
            transforms = [LogitAffine(*transform) for transform in plan.transform]
            texts = describe_goals(parsed, transforms=transforms)
        else:
            level = plan.level or DEFAULT_LEVEL
            texts = describe_goals(parsed, strengths=plan.strength, level=level)
        goals = [one for text in texts for one in text.goals(self.store)]
        return compiler.compile(
            [
                Goal(
                    attribute,
                    factor if transform.is_identity else 1.0,
                    transform=transform,
                    neutral_end=plan.neutral_end,
                )
                for attribute, transform in compiler.merge(goals)
            ]
        )
