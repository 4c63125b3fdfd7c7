"""Find the strengths of a suite by the price of steering, on prompts that are not evaluated.

The result is kept in a file after every measurement, from which an interrupted run resumes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from foretrace import _io
from foretrace.attribute import Attribute, parse
from foretrace.engines.cleaning import first_words
from foretrace.engines.transformers.calibration import SteeredRuns
from foretrace.errors import InvalidInputError
from foretrace.evaluate.continuations import ContinuationGenerator
from foretrace.evaluate.preparation import (
    MethodBuilder,
    Row,
    fill_template,
    goal_checksum,
    rows_identity,
)
from foretrace.evaluate.suite import AttributePlan, MethodPlan, Suite
from foretrace.lookahead.levels import BUDGETS, find_strength
from foretrace.lookahead.strengths import HMMPrices
from foretrace.steering import CompiledGoal, Compiler, Goal

NUM_PROMPTS, COPIES = 32, 4
TOKENS = 128  # of the copies of a prompt together: long texts need fewer copies
TOLERANCE = 0.1  # of the price, relative
OPENING_WORDS = 6  # of a text, where a suite has no prompts for calibration
OnStage = Callable[[str, int, int, str], None]
"""A progress callback. Its arguments are the stage, the units done, all units, and the unit."""


class Strengths(NamedTuple):
    """The strengths that were found.

    Attributes:
        levels: For each attribute of a suite, the strength of each level.
        matched: For each method that matches another, the `factor` of its strengths, and the
            `price` of the other method in nats per token.
    """

    levels: dict[str, dict[str, float]]
    matched: dict[str, dict[str, float]]

    def factor(self, method: str) -> float:
        """Return the factor of a method's strengths; 1 if it does not match another."""
        return self.matched[method]["factor"] if method in self.matched else 1.0


def find_strengths(
    suite: Suite,
    methods: Sequence[str],
    builder: MethodBuilder,
    generator: ContinuationGenerator,
    data: Path,
    out: Path,
    identities: Mapping[str, str],
    on_progress: OnStage,
) -> Strengths:
    """Find the strengths that methods need, or read them from `calibration.json` in `out`.

    Levels are written into the attributes of the builder's store. `identities` are checksums of the
    language model and the HMM.
    """
    if not any(suite.methods[name].used_level for name in methods):
        return Strengths({}, {})
    rows, column = read_calibration_prompts(suite, data)
    calibration_builder = builder.with_prompts(rows, column)
    inputs = calibration_builder.inputs()
    sampling = generator.sampling
    copies = max(1, min(COPIES, TOKENS // sampling.max_new_tokens))
    settings = {
        **identities,
        "prompts": rows_identity([{"prompt": text} for text in inputs]),
        "copies": copies,
        "max_new_tokens": sampling.max_new_tokens,
    }
    search = StrengthSearch(
        suite,
        data,
        calibration_builder,
        SteeredRuns(
            generator.lm,
            generator.encode(inputs),
            ends=generator.ends,
            copies=copies,
            max_new_tokens=sampling.max_new_tokens,
        ),
        StrengthCache(out / "calibration.json", settings),
        on_progress,
    )
    levels = search.find_levels(methods, builder.prompts)
    return Strengths(levels, search.match_prices(methods))


def read_calibration_prompts(suite: Suite, data: Path) -> tuple[list[Row], str]:
    """Read prompts for calibration, evenly from all rows; return them and their text column.

    Prompts that the suite evaluates are left out.
    """
    table = suite.calibration or next(iter(suite.attributes.values()), None)
    if table is None:
        raise InvalidInputError(
            f"The suite '{suite.name}' needs `calibration`: the table of prompts to find strengths "
            f"with."
        )
    rows = table.rows(data)
    if suite.calibration is None:
        openings = [first_words(str(row[table.text]), OPENING_WORDS) for row in rows]
        rows = [{**row, table.text: text} for row, text in zip(rows, openings, strict=True)]
    evaluated = {row[suite.prompts.text] for row in suite.prompts.rows(data)}
    rows = [row for row in rows if row[table.text] not in evaluated]
    if not rows:
        raise InvalidInputError(
            f"The suite '{suite.name}' evaluates all prompts of its calibration. Set "
            f"`calibration` to other prompts."
        )
    count = min(NUM_PROMPTS, len(rows))
    return [rows[index * len(rows) // count] for index in range(count)], table.text


@dataclass
class StrengthCache:
    """A file of the prices and strengths that were found with the same settings."""

    file: Path
    settings: Mapping[str, Any]
    _searches: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.file.is_file():
            content = _io.read_json(self.file)
            if content.get("settings") == self.settings:
                self._searches = content["searches"]

    def find(
        self, key: str, price: Callable[[float], float], name: str, budget: float, start: float
    ) -> float:
        """Find the strength of a budget with a name, or read it from the file."""
        search = self._searches.setdefault(key, {"prices": {}, "strengths": {}})
        known = {float(strength): spent for strength, spent in search["prices"].items()}

        def measure(strength: float) -> float:
            spent = price(strength)
            search["prices"][repr(strength)] = spent
            self._save()
            return spent

        if name not in search["strengths"]:
            search["strengths"][name] = find_strength(
                measure, budget, known, start=start, tolerance=TOLERANCE
            )
            self._save()
        return search["strengths"][name]

    def price(self, key: str, price: Callable[[], float]) -> float:
        """Measure a price, or read it from the file."""
        prices = self._searches.setdefault(key, {"prices": {}, "strengths": {}})["prices"]
        if "1.0" not in prices:
            prices["1.0"] = price()
            self._save()
        return prices["1.0"]

    def _save(self) -> None:
        _io.write_json(self.file, {"settings": self.settings, "searches": self._searches})


@dataclass(frozen=True)
class StrengthSearch:
    """Finds the strengths of a suite's levels and of methods that match the price of another."""

    suite: Suite
    data: Path
    builder: MethodBuilder
    """Builds goals for the calibration prompts."""
    runs: SteeredRuns
    cache: StrengthCache
    on_progress: OnStage

    def find_levels(
        self, methods: Iterable[str], prompts: Sequence[Row]
    ) -> dict[str, dict[str, float]]:
        """Find the levels that methods use, and write them into the attributes' files.

        The attributes of all values of a column are calibrated together: they share the strengths
        at which the mean over them has the price of the level.
        """
        used = self._used_levels(methods, prompts)
        found = {}
        for name, plan in self.suite.attributes.items():
            names = {name}
            if plan.by is not None:
                names = {str(row[plan.by]) + plan.suffix for row in plan.rows(self.data)}
            levels = set().union(*(used.get(member, set()) for member in names))
            attributes = {member: self.builder.store[member] for member in sorted(names)}
            if not levels or not all(one.has_power for one in attributes.values()):
                continue  # attributes without powers have strength 1 at all levels
            found[name] = self._find_levels_of(name, plan, attributes, levels)
            for attribute in attributes.values():
                if attribute.config.levels != found[name]:
                    self.builder.store.add(_with_levels(attribute, found[name]))
        return found

    def match_prices(self, methods: Iterable[str]) -> dict[str, dict[str, float]]:
        """Find the factor of strengths at which each method costs as much as the one it matches.

        The result holds the factor and the price of every method that matches another.
        """
        matched = {}
        for name in methods:
            plan = self.suite.methods[name]
            if plan.match_price is None:
                continue
            other = self.suite.methods[plan.match_price]
            budget = self.cache.price(self._key(other), partial(self._price, other))
            if not budget > 0:
                raise InvalidInputError(
                    f"The method '{name}' cannot match the price of '{plan.match_price}', which "
                    f"costs nothing."
                )
            key = f"{self._key(plan)} for {budget!r}"
            factor = self.cache.find(key, partial(self._price, plan), "factor", budget, 1.0)
            matched[name] = {"factor": factor, "price": budget}
            self.on_progress(f"calibrate: {name}", 1, 1, "strengths")
        return matched

    def _find_levels_of(
        self, name: str, plan: AttributePlan, attributes: Mapping[str, Attribute], levels: set[str]
    ) -> dict[str, float]:
        """Find the strengths of levels, shared by the attributes of a plan."""
        chosen = [self._attribute_of(name, plan, attributes, row) for row in self.builder.prompts]
        identity = rows_identity([{key: one.checksum} for key, one in attributes.items()])

        def price(strength: float) -> float:
            goals = {
                attribute.name: self._goal(attribute, strength)
                for attribute in {one.name: one for one in chosen}.values()
            }
            return self.runs.price([goals[attribute.name] for attribute in chosen])

        found: dict[str, float] = {}
        for done, level in enumerate(sorted(levels, key=lambda one: BUDGETS[one]), 1):
            budget = BUDGETS[level]
            start = HMMPrices(self.builder.hmm).strength(chosen[0], budget)
            found[level] = self.cache.find(f"{name} {identity}", price, level, budget, start)
            self.on_progress(f"calibrate: {name}", done, len(levels), "levels")
        return found

    def _attribute_of(
        self, name: str, plan: AttributePlan, attributes: Mapping[str, Attribute], row: Row
    ) -> Attribute:
        """Return the attribute that a calibration prompt is steered toward."""
        key = name if plan.by is None else str(row.get(plan.by)) + plan.suffix
        if key not in attributes:
            raise InvalidInputError(
                f"The suite '{self.suite.name}' fits '{name}' by {plan.by}, but a calibration "
                f"prompt has the {plan.by} '{row.get(plan.by or '')}', which was not fitted."
            )
        return attributes[key]

    def _goal(self, attribute: Attribute, strength: float) -> CompiledGoal:
        # As far as methods look ahead by default; farther is slower, and no method would use it.
        horizon = min(MethodPlan.horizon, self.runs.max_new_tokens)
        compiler = Compiler(self.builder.hmm, horizon, memory=0)
        return compiler.compile(Goal(attribute, strength))

    def _price(self, plan: MethodPlan, factor: float = 1.0) -> float:
        return self.runs.price(self.builder.goals(plan, factor))

    def _key(self, plan: MethodPlan) -> str:
        """Return a checksum of a method's goals on the calibration prompts, and of its HMM."""
        goals = self.builder.goals(plan)
        key = rows_identity([{"goals": goal_checksum(goal)} for goal in goals])
        return key if plan.hmm is None else f"{key} {self.builder.hmm_of(plan).checksum}"

    def _used_levels(self, methods: Iterable[str], prompts: Sequence[Row]) -> dict[str, set[str]]:
        """Return the levels that methods use of each attribute."""
        plans = [self.suite.methods[name] for name in methods]
        plans += [self.suite.methods[plan.match_price] for plan in plans if plan.match_price]
        used: dict[str, set[str]] = {}
        for plan in plans:
            if plan.used_level is None:
                continue
            for expression in {fill_template(goal, row) for goal in plan.goals for row in prompts}:
                for name in parse(expression).names:
                    used.setdefault(name, set()).add(plan.used_level)
        return used


def _with_levels(attribute: Attribute, levels: Mapping[str, float]) -> Attribute:
    return replace(attribute, config=replace(attribute.config, levels=dict(levels)))
