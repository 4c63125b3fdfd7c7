"""Evaluation suites: prompts, attributes, methods and judges, read from YAML."""

import difflib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

from foretrace import _tabular
from foretrace.attribute import group_terms
from foretrace.attribute.fitting.words import GROUPS
from foretrace.engines.transformers.samples import NUM_TEXTS
from foretrace.errors import InvalidFileError, InvalidInputError, reason
from foretrace.evaluate import metrics
from foretrace.lookahead.levels import BUDGETS, DEFAULT_LEVEL

METRICS: dict[str, Callable[[metrics.Scores], metrics.Measurement]] = {
    "average_maximum": metrics.average_maximum,
    "probability_of_any": metrics.probability_of_any,
    "mean": metrics.mean_score,
}
Plan = TypeVar("Plan")
Value = TypeVar("Value")


@dataclass(frozen=True)
class Table:
    r"""Rows of a file in the data folder.

    Attributes:
        file: The path of the file, relative to the data folder.
        text: The column of texts.
        where: Keep only rows that have these values in these columns.
        share: `{by: column, of: 2, take: 0}` keeps a part of the rows, chosen by a hash of the
            column.
        at_most: `{by: column, rows: 5}` keeps at most so many rows of each value of the column.

    Example:
        >>> from foretrace.evaluate.suite import Table
        >>> _ = (folder / "texts.csv").write_text("text,split\na b,train\nc d,test\n")
        >>> Table("texts.csv", where={"split": "test"}).rows(folder)
        [{'text': 'c d', 'split': 'test'}]
    """

    file: str
    text: str = "text"
    where: Mapping[str, Any] = field(default_factory=dict)
    share: Mapping[str, Any] = field(default_factory=dict)
    at_most: Mapping[str, Any] = field(default_factory=dict)

    def rows(self, data: str | os.PathLike[str]) -> list[dict[str, Any]]:
        """Read the rows, without those whose text is blank.

        Args:
            data: The data folder.

        Returns:
            A dictionary from column to value for each row.

        Raises:
            InvalidFileError: If the file cannot be read, has no such column, or has no row to keep.
        """
        path = Path(data) / self.file
        rows = _tabular.read_rows(path)
        if not rows or self.text not in rows[0]:
            raise InvalidFileError(f"{path} has no '{self.text}'. Set `text: COLUMN` in the suite.")
        rows = [
            row
            for row in rows
            if str(row[self.text]).strip()
            and all(row.get(column) == value for column, value in self.where.items())
        ]
        if self.share:
            by, of, take = (self.share[key] for key in ("by", "of", "take"))
            rows = [row for row in rows if crc32(str(row[by]).encode()) % of == take]
        if self.at_most:
            rows = list(_at_most(rows, self.at_most["by"], self.at_most["rows"]))
        if not rows:
            raise InvalidFileError(f"{path} has no rows of {dict(self.where)}. Check the suite.")
        return rows


def _at_most(rows: list[dict[str, Any]], by: str, limit: int) -> Iterator[dict[str, Any]]:
    """Yield the first rows of each value of a column."""
    counts: Counter[Any] = Counter()
    for row in rows:
        counts[row[by]] += 1
        if counts[row[by]] <= limit:
            yield row


@dataclass(frozen=True)
class AttributePlan(Table):
    """The data and the settings of a fit: one attribute from scores, or one for each label.

    Attributes:
        score: The column of scores in [0, 1].
        invert: Whether to fit 1 - score.
        equals: If set, the score is 1 where the column has this value and otherwise 0.
        by: Fit one attribute for each value of this column, instead of `score`.
        suffix: Appended to the values of `by` to name their attributes, where a suite fits the same
            values in two ways.
        transform: Scale and shift of the scores' logits: the training transform.
        objective: The objective of the fit. `FitConfig` has the defaults of both.
        keep: A list of words that must not decide, or "groups": terms for groups of people.
        terms: The maximal number of terms of the mixture.
        uses_lm: Whether the fit uses the HMM's token frequencies, the LM's embeddings and samples.
        samples: The number of samples of the LM that evidence is also fitted to, if there is one
            score per text. They continue the prompts for calibration.
    """

    score: str | None = None
    invert: bool = False
    equals: Any = None
    by: str | None = None
    suffix: str = ""
    transform: tuple[float, float] | None = None
    objective: str | None = None
    keep: str | Sequence[str] = ()
    terms: int = 1
    uses_lm: bool = True
    samples: int = NUM_TEXTS

    def __post_init__(self) -> None:
        if isinstance(self.keep, str) and self.keep != GROUPS:
            raise InvalidInputError(
                f"`keep: {self.keep}` is not known. Write a list of words, or `keep: {GROUPS}`."
            )

    @property
    def uses_samples(self) -> bool:
        """Whether the fit uses samples of the LM: products and labels do not."""
        is_evidence = self.objective in (None, "auto", "evidence") and self.terms == 1
        return self.uses_lm and self.by is None and self.samples > 0 and is_evidence

    @property
    def kept_words(self) -> Sequence[str]:
        """The words that must not decide."""
        return group_terms() if self.keep == GROUPS else self.keep


@dataclass(frozen=True)
class MethodPlan:
    """A method of generation.

    Several goals without a transform are steered toward as one conjunction. With transforms, as in
    the paper, every goal has its own factor.

    Attributes:
        goals: Expressions over attributes. `{column}` stands for the value of the prompt's row.
        strength: The strength of each goal; None to use the level.
        level: The level of all goals; None for the default level.
        transform: The decode-time transform of each goal, a scale and a shift: the paper's. It
            excludes strength and level.
        match_price: The name of another method. The strengths of the level are multiplied by the
            factor at which this method has the price of the other one on the prompts of the
            calibration.
        horizon: The number of tokens to look ahead. 0 weighs the next token alone.
        neutral_end: Whether the end of text keeps its unsteered probability, so that stopping early
            does not help to reach the goal.
        hmm: The folder or hub id of another HMM to steer with; None for the evaluation's own.
        instruction: A template that replaces the suite's, with `{prompt}` and `{column}`. In a
            chat, the system message.
        best_of: The number of candidates for each continuation.
        best_by: The attribute expression by which the best candidate is chosen.
        plugin: `module:function`, a method from outside foretrace. With goals, foretrace steers the
            LM that the plug-in has changed, by strengths that were measured without the plug-in.
        options: The options of the plug-in's function.
        curve: The name of the trade-off curve that the method is a point of.
    """

    goals: tuple[str, ...] = ()
    strength: tuple[float, ...] | None = None
    level: str | None = None
    transform: tuple[tuple[float, float], ...] | None = None
    match_price: str | None = None
    horizon: int = 64
    neutral_end: bool = True
    hmm: str | None = None
    instruction: str | None = None
    best_of: int = 1
    best_by: str | None = None
    plugin: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    curve: str | None = None

    @property
    def used_level(self) -> str | None:
        """The level that the strengths come from; None for other kinds of steering."""
        if not self.goals or self.strength is not None or self.transform is not None:
            return None
        return self.level or DEFAULT_LEVEL


@dataclass(frozen=True)
class JudgePlan:
    """A judge, of one of three kinds: `train`, `source` or `attribute`.

    Attributes:
        figures: The metrics of its scores: `average_maximum`, `probability_of_any`, `mean`.
        train: The texts to train a linear judge on.
        label: The column of their labels.
        judged: The label whose probability is the score. `{column}` stands for the value of the
            prompt's row.
        source: `module:function`, a classifier by folder or hub id (with `judged`), or
            `perspective`.
        attribute: An attribute expression, whose probability is the score.
        encoder: The sentence encoder of a linear judge, by folder or hub id, instead of the
            evaluation's. `$NAME` stands for an environment variable.
        calibration: Texts with reference scores, to measure the judge's agreement with them.
        calibration_score: The column of the reference scores.
        calibration_equals: If set, the reference score is 1 where the column has this value and
            otherwise 0.
    """

    figures: tuple[str, ...]
    train: Table | None = None
    label: str = "label"
    judged: str | None = None
    source: str | None = None
    attribute: str | None = None
    encoder: str | None = None
    calibration: Table | None = None
    calibration_score: str = "score"
    calibration_equals: Any = None


@dataclass(frozen=True)
class Suite:
    """An evaluation, apart from the LM and its HMM.

    Attributes:
        name: The name of the suite.
        prompts: The prompts.
        skip: How many of the first prompts are left out, such as those that settings were chosen
            on.
        attributes: The attributes to fit, by name. With `by`, the names are the column's values.
        methods: The methods to compare, by name.
        judges: The judges, by name.
        calibration: Prompts to find the strengths of levels with. They are not evaluated. By
            default, the first words of the texts that the first attribute is fitted to.
        template: The LM's input, with `{prompt}` and `{column}` of the prompt's row.
        chat: Whether the template is a user's message that the LM answers, through the chat
            template of its tokenizer.
        group: A column of the prompts. Scores are also reported for each of its values.
        rival: The method that others are compared with, group by group.
        baseline: The method that changes are relative to.
        continuations: The number of continuations of each prompt.
        max_new_tokens: The maximal number of generated tokens.
        top_p: The nucleus of sampling.

    Example:
        >>> from foretrace.evaluate.suite import load_suite
        >>> suite = load_suite("sentiment")
        >>> suite.methods["strong"].level
        'strong'
    """

    name: str
    prompts: Table
    attributes: Mapping[str, AttributePlan]
    methods: Mapping[str, MethodPlan]
    judges: Mapping[str, JudgePlan]
    calibration: Table | None = None
    template: str = "{prompt}"
    chat: bool = False
    group: str | None = None
    rival: str | None = None
    baseline: str = "bare"
    skip: int = 0
    continuations: int = 25
    max_new_tokens: int = 20
    top_p: float = 0.9

    def __post_init__(self) -> None:
        if self.baseline not in self.methods:
            raise InvalidInputError(
                f"The suite '{self.name}' has no method '{self.baseline}' to compare with; it has "
                f"{', '.join(self.methods)}."
            )
        if self.rival is not None and self.rival not in self.methods:
            raise InvalidInputError(f"The suite '{self.name}' has no method '{self.rival}'.")
        for name, method in self.methods.items():
            self._check_method(name, method)
        for name, judge in self.judges.items():
            _check_judge(name, judge)

    def _check_method(self, name: str, method: MethodPlan) -> None:
        if (method.best_of > 1) != (method.best_by is not None):
            raise InvalidInputError(
                f"The method '{name}' must set both best_of (a number) and best_by (an "
                f"attribute), or neither."
            )
        if method.options and method.plugin is None:
            raise InvalidInputError(
                f"The method '{name}' has options, but no plug-in. Set `plugin: module:function`."
            )
        _check_strength(name, method)
        if method.match_price is not None:
            other = self.methods.get(method.match_price)
            if other is None or not other.goals or other.match_price is not None:
                raise InvalidInputError(
                    f"The method '{name}' cannot match the price of '{method.match_price}'. Name a "
                    f"steered method that does not match another one."
                )


def _check_strength(name: str, method: MethodPlan) -> None:
    """Check that at most one key sets the strength of a method, and that it has goals."""
    keys = ("strength", "level", "transform", "match_price", "hmm")
    used = [key for key in keys if getattr(method, key) is not None]
    if used and not method.goals:
        raise InvalidInputError(f"The method '{name}' has {used[0]}, but no goals.")
    used = [key for key in used if key != "hmm"]
    if len(used) > 1 and set(used) != {"level", "match_price"}:
        raise InvalidInputError(
            f"The method '{name}' has {' and '.join(used)}, which exclude each other. Keep one."
        )
    if method.level is not None and method.level not in BUDGETS:
        raise InvalidInputError(
            f"The method '{name}' has the unknown level '{method.level}'. Choose one of "
            f"{', '.join(BUDGETS)}."
        )


def _check_judge(name: str, judge: JudgePlan) -> None:
    if not isinstance(judge.judged, str | None):
        raise InvalidInputError(f"The judge '{name}': write judged in quotes, as a label.")
    kinds = [judge.train, judge.source, judge.attribute]
    if sum(kind is not None for kind in kinds) != 1:
        raise InvalidInputError(
            f"The judge '{name}' needs exactly one of train, source and attribute."
        )
    if unknown := [figure for figure in judge.figures if figure not in METRICS]:
        raise InvalidInputError(
            f"The judge '{name}' has the unknown figure {unknown[0]}. Known figures are "
            f"{', '.join(METRICS)}."
        )


def add_rival_hmm(suite: Suite, hmm: str) -> Suite:
    """Add to every steered method one that steers with another HMM at the same price.

    Only methods at levels get such a rival. Methods with a strength or a transform cannot match a
    price.

    Args:
        suite: The suite.
        hmm: The folder or hub id of the other HMM. Its name is appended to the names of methods.

    Returns:
        The suite with the added methods.

    Example:
        >>> from foretrace.evaluate.suite import add_rival_hmm, load_suite
        >>> suite = add_rival_hmm(load_suite("long-detox"), "hmms/small")
        >>> list(suite.methods)
        ['bare', 'medium', 'medium, small', 'strong', 'strong, small']
        >>> suite.methods["medium, small"].match_price
        'medium'
    """
    methods: dict[str, MethodPlan] = {}
    for name, plan in suite.methods.items():
        methods[name] = plan
        if plan.used_level is not None and plan.hmm is None:
            matched = plan.match_price or name
            rival = replace(plan, hmm=hmm, match_price=matched)
            methods[rival_name(name, hmm)] = rival
    return replace(suite, methods=methods)


def rival_name(method: str, hmm: str) -> str:
    """Return the name of a method that steers with another HMM: a folder or hub id.

    Example:
        >>> from foretrace.evaluate.suite import rival_name
        >>> rival_name("medium", "hmms/small")
        'medium, small'
    """
    return f"{method}, {Path(hmm).name}"


def suite_names() -> list[str]:
    """Return the sorted names of the suites that come with foretrace.

    Example:
        >>> from foretrace.evaluate.suite import suite_names
        >>> "detox" in suite_names()
        True
    """
    names = [entry.name for entry in files("foretrace.evaluate").joinpath("suites").iterdir()]
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def load_suite(source: str | os.PathLike[str]) -> Suite:
    r"""Load a suite.

    Args:
        source: The name of a suite that comes with foretrace, or a YAML file.

    Returns:
        The suite.

    Raises:
        InvalidInputError: If there is no such suite, or it contradicts itself.
        InvalidFileError: If the file cannot be read as a suite.

    Example:
        >>> from foretrace.evaluate.suite import load_suite
        >>> _ = (folder / "mine.yaml").write_text("extends: detox\ncontinuations: 5\n")
        >>> load_suite(folder / "mine.yaml").continuations
        5
    """
    return _build_suite(Path(source).stem, _read_content(os.fspath(source), ()))


def _read_content(source: str, extending: tuple[str, ...]) -> dict[str, Any]:
    """Read a suite's YAML; its keys override the keys of a suite that it extends."""
    import yaml

    if source in extending:
        raise InvalidFileError(f"The suite '{source}' extends itself.")
    try:
        content = dict(_mapping(yaml.safe_load(_read_text(source)), source))
    except yaml.YAMLError as error:
        raise InvalidFileError(f"{source} is not YAML ({reason(error)}).") from error
    if "extends" in content:
        base = str(content.pop("extends"))
        content = {**_read_content(base, (*extending, source)), **content}
    return content


def _read_text(source: str) -> str:
    """Read the YAML file of a suite, by name or path."""
    path = Path(source)
    if path.suffix in {".yaml", ".yml"}:
        if not path.is_file():
            raise InvalidFileError(f"There is no file {path}. Check the spelling.")
        return path.read_text("utf-8")
    if source not in suite_names():
        matches = difflib.get_close_matches(source, suite_names(), n=1)
        hint = f"Did you mean {matches[0]}? " if matches else ""
        raise InvalidInputError(
            f"There is no suite '{source}'. {hint}Use one of {', '.join(suite_names())}, or a "
            f"YAML file."
        )
    folder = files("foretrace.evaluate").joinpath("suites")
    return folder.joinpath(f"{source}.yaml").read_text("utf-8")


def _build_suite(name: str, content: Any) -> Suite:
    values = {"attributes": {}, **_mapping(content, name), "name": name}
    builders: dict[str, Callable[[Any, str], Any]] = {
        "attributes": partial(_build, AttributePlan),
        "methods": _build_method,
        "judges": _build_judge,
    }
    for key, build in builders.items():
        entries = _mapping(values.get(key), f"{name}: {key}")
        values[key] = {
            entry: build(value, f"{name}: {key}: {entry}") for entry, value in entries.items()
        }
    values["prompts"] = _build(Table, values.get("prompts"), f"{name}: prompts")
    if values.get("calibration") is not None:
        values["calibration"] = _build(Table, values["calibration"], f"{name}: calibration")
    return _build(Suite, values, name)


def _build_method(content: Any, where: str) -> MethodPlan:
    values = dict(_mapping(content or {}, where))
    goals = values.get("goals", [])
    goals = [goals] if isinstance(goals, str) else _list(goals, where)
    if any(not isinstance(goal, str) for goal in goals):
        raise InvalidFileError(
            f"{where}: a goal is an expression, such as `goals: nontoxic & ~formal`. Strength, "
            f"level and transform are keys of the method."
        )
    values["goals"] = tuple(goals)
    values["options"] = _mapping(values.get("options") or {}, f"{where}: options")
    if values.get("strength") is not None:
        values["strength"] = _one_for_each(goals, values["strength"], where, _number)
    if values.get("transform") is not None:
        values["transform"] = _one_for_each(goals, values["transform"], where, _transform)
    return _build(MethodPlan, values, where)


def _one_for_each(
    goals: Sequence[str], content: Any, where: str, convert: Callable[[Any], Value | None]
) -> tuple[Value, ...]:
    """Convert one value for all goals, or a list of one for each goal."""
    single = convert(content)
    if single is not None:
        return (single,) * len(goals)
    values = [convert(item) for item in content] if isinstance(content, list) else []
    converted = tuple(value for value in values if value is not None)
    if len(converted) < len(values) or len(values) != len(goals):
        raise InvalidFileError(
            f"{where}: there are {len(goals)} goals. A strength is a number and a transform "
            f"[scale, shift]: set one for all goals, or a list of one for each."
        )
    return converted


def _number(content: Any) -> float | None:
    valid = isinstance(content, int | float) and not isinstance(content, bool)
    return float(content) if valid else None


def _transform(content: Any) -> tuple[float, float] | None:
    if not isinstance(content, list) or len(content) != 2:
        return None
    scale, shift = map(_number, content)
    return None if scale is None or shift is None else (scale, shift)


def _build_judge(content: Any, where: str) -> JudgePlan:
    values = dict(_mapping(content, where))
    for name in ("train", "calibration"):
        if values.get(name) is not None:
            values[name] = _build(Table, values[name], f"{where}: {name}")
    figures = tuple(_list(values.get("figures"), where))
    return _build(JudgePlan, {**values, "figures": figures}, where)


def _build(kind: type[Plan], content: Any, where: str) -> Plan:
    """Build a dataclass from its YAML; an error names unknown and missing keys."""
    values = dict(_mapping(content, where))
    names = [member.name for member in fields(kind)]  # type: ignore[arg-type]
    for key in values:
        if key not in names:
            matches = difflib.get_close_matches(str(key), names, n=1)
            hint = f"Did you mean {matches[0]}?" if matches else f"Use {', '.join(names)}."
            raise InvalidFileError(f"{where}: '{key}' is not known. {hint}")
    try:
        return kind(**values)
    except TypeError as error:
        raise InvalidFileError(f"{where}: {reason(error)}.") from error


def _mapping(content: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(content, Mapping):
        raise InvalidFileError(f"{where} must be a mapping of names to values.")
    return content


def _list(content: Any, where: str) -> Sequence[Any]:
    if content is None:
        return []
    if not isinstance(content, list):
        raise InvalidFileError(f"{where}: goals and figures are lists.")
    return content
