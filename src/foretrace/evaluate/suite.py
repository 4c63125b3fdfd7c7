"""Suites: prompts, what is fitted, the methods compared, and who judges, in a little YAML."""

import difflib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

from foretrace import _tabular
from foretrace.attribute import LogitAffine
from foretrace.errors import InvalidFileError, InvalidInputError, reason
from foretrace.evaluate import metrics

FIGURES: dict[str, Callable[[metrics.Scores], metrics.Measurement]] = {
    "average_maximum": metrics.average_maximum,
    "probability_of_any": metrics.probability_of_any,
    "mean": metrics.mean_score,
}
Part = TypeVar("Part")


@dataclass(frozen=True)
class Table:
    """Rows of a file below the data folder."""

    file: str
    text: str = "text"
    where: Mapping[str, Any] = field(default_factory=dict)
    """Only rows with these values in these columns."""
    share: Mapping[str, Any] = field(default_factory=dict)
    """{by: column, of: 2, take: 0}: a part of the rows, decided by what the column holds."""
    at_most: Mapping[str, Any] = field(default_factory=dict)
    """{by: column, rows: 5}: no more than so many rows of one value."""

    def rows(self, data: Path) -> list[dict[str, Any]]:
        """Read them; those without text are left out."""
        path = data / self.file
        found = _tabular.read_rows(path)
        if not found or self.text not in found[0]:
            raise InvalidFileError(f"{path} has no '{self.text}'. Say `text: COLUMN` in the suite.")
        kept = [
            row
            for row in found
            if str(row[self.text]).strip()
            and all(row.get(key) == to for key, to in self.where.items())
        ]
        if self.share:
            by, of, take = (self.share[key] for key in ("by", "of", "take"))
            kept = [row for row in kept if crc32(str(row[by]).encode()) % of == take]
        if self.at_most:
            kept = list(_at_most(kept, self.at_most["by"], self.at_most["rows"]))
        if not kept:
            raise InvalidFileError(f"{path} has no rows of {dict(self.where)}. Check the suite.")
        return kept


def _at_most(rows: list[dict[str, Any]], by: str, most: int) -> Iterator[dict[str, Any]]:
    seen: Counter[Any] = Counter()
    for row in rows:
        seen[row[by]] += 1
        if seen[row[by]] <= most:
            yield row


@dataclass(frozen=True)
class Fitting(Table):
    """What an attribute is fitted to: scores, or labels of which each gets its own attribute."""

    score: str | None = None
    invert: bool = False
    equals: Any = None
    """With this, the score is 1 where the column has this value and else 0."""
    by: str | None = None
    transform: tuple[float, float] = (1.0, 0.0)
    """Scale and shift of the scores: the training transform."""
    objective: str = "cross-entropy"
    terms: int = 1

    @property
    def affine(self) -> LogitAffine:
        """The training transform."""
        return LogitAffine(*self.transform)


@dataclass(frozen=True)
class Steer:
    """A goal: an expression over attributes, in which {column} stands for the prompt's own."""

    of: str
    strength: float = 1.0
    shift: float = 0.0


@dataclass(frozen=True)
class MethodPlan:
    """A way to write."""

    goals: tuple[Steer, ...] = ()
    horizon: int = 64
    """0 weighs the next token alone: no lookahead."""
    neutral_end: bool = False
    """Whether texts end as often as bare ones do: no escape from the goal."""
    instruction: str | None = None
    """With {prompt}, and {column} of the prompt's row."""
    best_of: int = 1
    best_by: str | None = None
    curve: str | None = None
    """Methods of one curve are joined in the figure of the trade-off."""


@dataclass(frozen=True)
class JudgePlan:
    """Who judges: one of three kinds."""

    figures: tuple[str, ...]
    """What is computed from its scores: average_maximum, probability_of_any, mean."""
    train: Table | None = None
    """Texts to train a linear judge on ..."""
    label: str = "label"
    """... and the column of their labels."""
    judged: str | None = None
    """The label whose probability is the score; {column} stands for the prompt's own."""
    source: str | None = None
    """Or a module:function, a classifier by folder or hub id (with `judged`), or `perspective`."""
    attribute: str | None = None
    """Or the attribute itself, as an expression."""
    calibration: Table | None = None
    """Texts scored by somebody whom the judge stands in for ..."""
    calibration_score: str = "score"
    """... and the column of those scores ..."""
    calibration_equals: Any = None
    """... or of values, of which this one counts as 1 and others as 0."""


@dataclass(frozen=True)
class Suite:
    """Everything that an evaluation needs to know, beside the LM and its HMM."""

    name: str
    prompts: Table
    attributes: Mapping[str, Fitting]
    methods: Mapping[str, MethodPlan]
    judges: Mapping[str, JudgePlan]
    template: str = "{prompt}"
    """What the LM is given, with {prompt} and {column} of the prompt's row."""
    group: str | None = None
    """A column of the prompts: figures are also given for each of its values."""
    rival: str | None = None
    """The method that others are held against group by group, and drawn against."""
    baseline: str = "bare"
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
            if (method.best_of > 1) != (method.best_by is not None):
                raise InvalidInputError(
                    f"The method '{name}' must say both best_of (how many) and best_by (by what)."
                )
        for name, judge in self.judges.items():
            if not isinstance(judge.judged, str | None):
                raise InvalidInputError(f"The judge '{name}': write judged in quotes, as a label.")
            kinds = [judge.train, judge.source, judge.attribute]
            if sum(kind is not None for kind in kinds) != 1:
                raise InvalidInputError(
                    f"The judge '{name}' needs exactly one of train, source and attribute."
                )
            if unknown := [each for each in judge.figures if each not in FIGURES]:
                raise InvalidInputError(
                    f"The judge '{name}' is asked for {unknown[0]}: there is {', '.join(FIGURES)}."
                )


def suite_names() -> list[str]:
    """List the suites that come with foretrace."""
    found = files("foretrace.evaluate").joinpath("suites").iterdir()
    return sorted(each.name.removesuffix(".yaml") for each in found if each.name.endswith(".yaml"))


def load_suite(source: str) -> Suite:
    """Load a suite by name, or from a YAML file of one's own."""
    return _suite(Path(source).stem, _content(source, ()))


def _content(source: str, before: tuple[str, ...]) -> dict[str, Any]:
    """Read a suite; what it says takes the place of what the one says that it extends."""
    import yaml

    if source in before:
        raise InvalidFileError(f"The suite '{source}' extends itself.")
    try:
        content = dict(_mapping(yaml.safe_load(_text(source)), source))
    except yaml.YAMLError as error:
        raise InvalidFileError(f"{source} is not YAML ({reason(error)}).") from error
    if "extends" in content:
        content = {**_content(str(content.pop("extends")), (*before, source)), **content}
    return content


def _text(source: str) -> str:
    """Find a suite's YAML."""
    path = Path(source)
    if path.suffix in {".yaml", ".yml"}:
        if not path.is_file():
            raise InvalidFileError(f"There is no file {path}. Check the spelling.")
        return path.read_text("utf-8")
    if source not in suite_names():
        like = difflib.get_close_matches(source, suite_names(), n=1)
        hint = f"Did you mean {like[0]}? " if like else ""
        raise InvalidInputError(
            f"There is no suite '{source}'. {hint}There is {', '.join(suite_names())}; or give a "
            f"YAML file of your own."
        )
    folder = files("foretrace.evaluate").joinpath("suites")
    return folder.joinpath(f"{source}.yaml").read_text("utf-8")


def _suite(name: str, content: Any) -> Suite:
    known = dict(_mapping(content, name))
    return _part(
        Suite,
        {
            **known,
            "name": name,
            "prompts": _part(Table, known.get("prompts"), f"{name}: prompts"),
            "attributes": _parts(Fitting, known.get("attributes", {}), f"{name}: attributes"),
            "methods": {
                key: _method(value or {}, f"{name}: methods: {key}")
                for key, value in _mapping(known.get("methods"), f"{name}: methods").items()
            },
            "judges": {
                key: _judge(value, f"{name}: judges: {key}")
                for key, value in _mapping(known.get("judges"), f"{name}: judges").items()
            },
        },
        name,
    )


def _method(content: Any, where: str) -> MethodPlan:
    known = dict(_mapping(content, where))
    goals = [_part(Steer, each, f"{where}: goals") for each in _list(known.get("goals"), where)]
    return _part(MethodPlan, {**known, "goals": tuple(goals)}, where)


def _judge(content: Any, where: str) -> JudgePlan:
    known = dict(_mapping(content, where))
    for name in ("train", "calibration"):
        if known.get(name) is not None:
            known[name] = _part(Table, known[name], f"{where}: {name}")
    figures = tuple(_list(known.get("figures"), where))
    return _part(JudgePlan, {**known, "figures": figures}, where)


def _parts(kind: type[Part], content: Any, where: str) -> dict[str, Part]:
    return {
        name: _part(kind, value, f"{where}: {name}")
        for name, value in _mapping(content, where).items()
    }


def _part(kind: type[Part], content: Any, where: str) -> Part:
    """Build a part from its YAML; unknown and missing keys are named."""
    known = dict(_mapping(content, where))
    names = [each.name for each in fields(kind)]  # type: ignore[arg-type]
    for key in known:
        if key not in names:
            like = difflib.get_close_matches(str(key), names, n=1)
            hint = f"Did you mean {like[0]}?" if like else f"There is {', '.join(names)}."
            raise InvalidFileError(f"{where}: '{key}' is not known. {hint}")
    try:
        return kind(**known)
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
