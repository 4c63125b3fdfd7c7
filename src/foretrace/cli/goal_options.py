"""Options of commands that steer, and functions to load the HMM and the goals that they name."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, partial, reduce
from itertools import islice
from operator import and_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from foretrace.cli.terminal import ProgressBars

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from foretrace.attribute import Attribute, Expression, LogitAffine
    from foretrace.attribute.expression import Contains
    from foretrace.context import Probe
    from foretrace.hmm import HMM
    from foretrace.steering import CompiledGoal, Compiler, Goal

T = TypeVar("T")
MIN_CONSTRAINT_HORIZON = 64  # tokens
Model = Annotated[str, typer.Argument(help="The language model: a folder, or a hub id.")]
HMMSource = Annotated[str, typer.Option("--hmm", help="Its HMM: a folder, or a hub id.")]
OptionalHMM = Annotated[
    str | None,
    typer.Option(
        "--hmm",
        help="Its HMM: a folder, or a hub id. Without one, goals look at the next token alone.",
    ),
]
WITHOUT_HMM = (
    "Without --hmm, goals look at the next token alone. `foretrace distill` makes an HMM, which "
    "looks ahead."
)
UNIGRAM = "token frequencies"  # the name of an HMM that was not passed
GoalOption = partial(typer.Option, rich_help_panel="Goals")
StrengthOption = partial(typer.Option, rich_help_panel="Strength and place")
LookaheadOption = partial(typer.Option, rich_help_panel="Lookahead")
PromptOption = partial(typer.Option, rich_help_panel="Prompts")
SamplingOption = partial(typer.Option, rich_help_panel="Sampling")
OutputOption = partial(typer.Option, rich_help_panel="Output")
GOAL = GoalOption(
    "--goal",
    help="Attributes joined by & | ~, such as 'nontoxic & ~formal'; repeatable: a text is steered "
    "toward all goals.",
)
Expressions = Annotated[list[str], GOAL]
MustContain = Annotated[
    list[str] | None,
    GoalOption(metavar="TEXT", help="A text that must occur in the continuation; repeatable."),
]
MustNotContain = Annotated[
    list[str] | None,
    GoalOption(metavar="TEXT", help="A text that must not occur in the continuation; repeatable."),
]
WholeWords = Annotated[
    bool,
    GoalOption(
        "--whole-words",
        help="Find these texts only where no letter, digit or underscore is next to them.",
    ),
]
IgnoreCase = Annotated[
    bool, GoalOption("--ignore-case", help="Find these texts in small and capital letters.")
]

Attributes = Annotated[Path, GoalOption(help="The folder of attribute files.")]
ProbeFile = Annotated[
    Path | None,
    GoalOption(
        "--probe",
        help="The probe of the LM, for context rewards: a file of `foretrace probe`.",
        show_default="made of the LM",
    ),
]


class Level(StrEnum):
    """A level of steering: a strength for a price."""

    MILD = "mild"
    MEDIUM = "medium"
    STRONG = "strong"


Levels = Annotated[
    Level | None,
    StrengthOption(
        "--level",
        metavar="LEVEL",
        help="How strongly to steer: mild, medium or strong. `foretrace calibrate` finds the "
        "strengths of an attribute's levels.",
        show_default="medium",
    ),
]
Strengths = Annotated[
    list[str] | None,
    StrengthOption(
        "--strength",
        metavar="NUMBER",
        help="The exponent of a goal's attributes, instead of a level. One value for all goals, or "
        "one per goal.",
    ),
]
Transforms = Annotated[
    list[str] | None,
    StrengthOption(
        "--transform",
        metavar="SCALE,SHIFT",
        help="The paper's transform of a goal's probability, instead of a strength. One for all "
        "goals, or one per goal.",
    ),
]
Horizon = Annotated[int, LookaheadOption(min=0, help="Maximum number of tokens to look ahead.")]
NeutralEnd = Annotated[
    bool,
    LookaheadOption(
        help="Keep the LM's probability of the end-of-text token, so that texts do not end early "
        "to meet a goal."
    ),
]
After = Annotated[
    str | None,
    StrengthOption(
        metavar="TEXT",
        help="Steer only after this text occurs in the continuation, such as '</think>'.",
    ),
]
Window = Annotated[
    str | None,
    StrengthOption(
        metavar="TOKENS|TEXT",
        help="Stop steering after so many tokens, or at this text.",
        show_default="the end of the text",
    ),
]
MaxNewTokens = Annotated[int, SamplingOption(min=1, help="Maximum number of tokens to generate.")]
Temperature = Annotated[float, SamplingOption(min=0.0, help="Sampling temperature; 0 is greedy.")]
TopP = Annotated[
    float, SamplingOption(min=0.0, max=1.0, help="Nucleus sampling: the probability mass to keep.")
]
Seed = Annotated[
    int,
    SamplingOption(min=0, max=2**32 - 1, help="Random seed; the same seed gives the same text."),
]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto.")]
DTYPE_HELP = (
    "Dtype of the LM: float32, bfloat16, float16, or auto: bfloat16 unless the hardware lacks it."
)
Dtype = Annotated[str, typer.Option(help=DTYPE_HELP)]


def load_hmm(
    source: str, tokenizer: "PreTrainedTokenizerBase", device: "str | torch.device"
) -> "HMM":
    """Load an HMM, and check that it was made with this tokenizer."""
    from foretrace.hmm import HMM
    from foretrace.vocabulary import fingerprint

    expected = fingerprint(tokenizer.get_vocab())
    return HMM.from_pretrained(source, tokenizer_fingerprint=expected).to(device)


def load_or_measure_hmm(
    source: str | None,
    lm: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    length: int = 8,
) -> "HMM":
    """Load the HMM of an LM; if none is named, measure token frequencies in texts of `length`."""
    from foretrace.engines.transformers import unigram_hmm

    if source is not None:
        return load_hmm(source, tokenizer, lm.device)
    typer.secho(WITHOUT_HMM, dim=True, err=True)
    with ProgressBars(resumes=False, stderr=True) as bars:
        return unigram_hmm(lm, tokenizer, length=length, on_progress=bars.update)


def load_or_measure_gguf_hmm(
    source: str | None,
    file: str,
    tokenizer: "PreTrainedTokenizerBase",
    device: "str | torch.device",
    length: int = 8,
) -> "HMM":
    """Load the HMM of a GGUF file; if none is named, measure token frequencies with llama.cpp."""
    from foretrace.engines.llama_cpp import unigram_hmm

    if source is not None:
        return load_hmm(source, tokenizer, device)
    typer.secho(WITHOUT_HMM, dim=True, err=True)
    return unigram_hmm(file, length=length).to(device)


BuildProbe = Callable[[], "Probe"]
"""Returns the probe of an LM. The second call returns the same object."""


def probe_builder(lm: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> BuildProbe:
    """Return a function that builds the probe of a loaded LM, which takes seconds."""
    from foretrace.context import Head, Probe

    return cache(lambda: Probe.build(Head.of_model(lm, tokenizer), source=lm.name_or_path))


def probe_for(attributes: "Iterable[Attribute]", build: BuildProbe) -> "Probe | None":
    """Build the probe of the LM if one of the attributes has a context reward."""
    return None if all(one.context is None for one in attributes) else build()


@dataclass(frozen=True)
class GoalSettings:
    """How strongly to steer toward each goal: by strengths, by a level, or by transforms."""

    strengths: Sequence[float | None]
    """One per goal; None for the strength of the level."""
    level: str = Level.MEDIUM
    transforms: "Sequence[LogitAffine] | None" = None
    """One per goal, instead of strengths and level."""
    neutral_end: bool = True

    @property
    def description(self) -> str:
        """The settings as text."""
        if self.transforms is not None:
            values = ", ".join(f"{one.scale:g},{one.shift:g}" for one in self.transforms)
            return f"transform {values}"
        strengths = [value for value in self.strengths if value is not None]
        if strengths:
            return f"strength {', '.join(f'{value:g}' for value in strengths)}"
        return f"level {self.level}"


def check_settings(
    strengths: list[str] | None,
    level: Level | None,
    transforms: list[str] | None,
    neutral_end: bool,
    goals: int,
) -> GoalSettings:
    """Check the options of `goals` goals. Commands call this before they load the LM."""
    from foretrace.errors import InvalidInputError

    named = {"--strength": strengths, "--level": level, "--transform": transforms}
    given = [option for option, value in named.items() if value]
    if len(given) > 1:
        raise typer.BadParameter(f"Pass {' or '.join(given)}, not both.")
    if strengths and not goals:
        raise typer.BadParameter("--strength needs a --goal, which is missing.")
    try:
        parsed_transforms = [parse_transform(text) for text in transforms or ()]
        parsed_strengths = [parse_strength(text) for text in strengths or ()]
    except InvalidInputError as error:
        raise typer.BadParameter(str(error)) from error
    if parsed_transforms:
        count = goals or 1  # required and forbidden texts alone are one goal
        parsed_transforms = _one_per_goal(parsed_transforms, count, given[0])
        return GoalSettings([None] * count, transforms=parsed_transforms, neutral_end=neutral_end)
    if parsed_strengths:
        parsed_strengths = _one_per_goal(parsed_strengths, goals, given[0])
        return GoalSettings(parsed_strengths, neutral_end=neutral_end)
    return GoalSettings([None] * goals, level or Level.MEDIUM, neutral_end=neutral_end)


def parse_strength(text: str) -> float:
    """Parse a strength within its limits."""
    from foretrace.errors import InvalidInputError
    from foretrace.steering.goal_text import MAX_STRENGTH, MIN_STRENGTH

    try:
        strength = float(text)
    except ValueError:
        strength = float("nan")
    if not MIN_STRENGTH <= strength <= MAX_STRENGTH:
        raise InvalidInputError(
            f"A strength is a number from {MIN_STRENGTH:g} to {MAX_STRENGTH:g}, not '{text[:40]}'. "
            f"To steer away from an attribute, negate it: '~name'."
        )
    return strength


def parse_transform(text: str) -> "LogitAffine":
    """Parse SCALE,SHIFT."""
    from foretrace.attribute import LogitAffine
    from foretrace.errors import InvalidInputError

    try:
        scale, shift = map(float, text.split(","))
    except ValueError:
        raise InvalidInputError(
            f"A transform is two numbers, SCALE,SHIFT, such as 10,-10, not '{text[:40]}'."
        ) from None
    return LogitAffine(scale, shift)


@dataclass(frozen=True)
class LoadedGoals:
    """The goal to steer toward, and the attributes to judge texts by."""

    goal: "CompiledGoal"
    """All goals as one."""
    goals: "list[Goal]"
    """A goal for each expression, with its strength, and one for the required texts."""
    compiler: "Compiler"
    attributes: "list[Attribute]"
    """The attribute of each expression, and the one of required and forbidden texts."""


def load_goals(
    hmm: "HMM",
    tokenizer: "PreTrainedTokenizerBase",
    folder: Path,
    expressions: list[str],
    settings: GoalSettings,
    horizon: int,
    must_contain: list[str] | None = None,
    must_not_contain: list[str] | None = None,
    *,
    whole_words: bool = False,
    ignore_case: bool = False,
    build_probe: BuildProbe,
    after: str | None = None,
    window: str | None = None,
) -> LoadedGoals:
    """Build the goals of expressions and constraints. A window of digits is a number of tokens."""
    from foretrace.attribute import AttributeStore
    from foretrace.engines.token_bytes import TokenBytes
    from foretrace.steering import Compiler, Goal
    from foretrace.steering.goal_text import describe_goals

    store = AttributeStore(folder, tokenizer_fingerprint=hmm.config.tokenizer_fingerprint)
    token_bytes = cache(TokenBytes.of)  # built at most once, and only if an expression needs it

    @cache
    def contains(operand: "Contains") -> "Attribute":
        return token_bytes(tokenizer).contains(operand)

    options: dict[str, Any] = {"neutral_end": settings.neutral_end}
    if after is not None:
        options["after"] = token_bytes(tokenizer).marker(after)
    if window is not None:
        is_count = window.isascii() and window.isdigit()
        options["window"] = int(window) if is_count else token_bytes(tokenizer).marker(window)
    parsed = _parse_goals(folder, expressions)
    texts: dict[str, Any] = {
        "must_contain": must_contain or (),
        "must_not_contain": must_not_contain or (),
        "whole_words": whole_words,
        "ignore_case": ignore_case,
    }
    has_texts = bool(must_contain or must_not_contain)
    if has_texts:
        # With a short horizon, steering would push a required text to occur too early.
        horizon = max(horizon, MIN_CONSTRAINT_HORIZON)

    def goals_of(selected: Sequence[int], **selected_texts: Any) -> list[Goal]:
        strengths = settings.strengths
        # Texts are not transformed, unless there are no expressions.
        transforms = settings.transforms if selected or not parsed else None
        described = describe_goals(
            [parsed[index] for index in selected],
            strengths=[strengths[index] for index in selected],
            level=settings.level,
            transforms=transforms and ([transforms[index] for index in selected] or transforms),
            **selected_texts,
        )
        return [goal for text in described for goal in text.goals(store, contains, **options)]

    groups = [goals_of([index]) for index in range(len(parsed))]
    groups += [goals_of([], **texts)] if has_texts else []
    goals = [goal for group in groups for goal in group]
    probe = probe_for((goal.attribute for goal in goals), build_probe)
    compiler = Compiler(hmm, horizon, probe)
    powers = iter(compiler.powers(goals))
    separate = [
        Goal(reduce(and_, islice(powers, len(group))), 1.0, transform=group[0].transform, **options)
        for group in groups
    ]
    attributes = [reduce(and_, (goal.attribute for goal in group)) for group in groups]
    whole = compiler.compile(goals_of(range(len(parsed)), **texts))
    return LoadedGoals(whole, separate, compiler, attributes)


def check_goals(folder: Path, expressions: Sequence[str]) -> None:
    """Check that a folder has the attributes of expressions, and warn of those without effect.

    Commands call this before they load the LM, so that a misspelt name is an error at once.
    """
    from foretrace.attribute import AttributeStore
    from foretrace.attribute.report import FAILS
    from foretrace.errors import InvalidInputError

    store, parsed = AttributeStore(folder), _parse_goals(folder, expressions)
    for name in sorted({name for expression in parsed for name in expression.wanted}):
        try:
            report = store[name].report
        except InvalidInputError:  # of another version: steering does not need it
            continue
        if report is not None and report.outcome == FAILS:
            typer.secho(f"{name}: {report.verdict}", fg="yellow", err=True)


def _parse_goals(folder: Path, expressions: Sequence[str]) -> "list[Expression]":
    """Parse expressions, and check that the folder has their attributes."""
    from foretrace.attribute import AttributeStore, parse
    from foretrace.attribute.expression import unknown_names
    from foretrace.errors import InvalidInputError

    parsed = [parse(text) for text in expressions]
    names = list(dict.fromkeys(name for expression in parsed for name in expression.names))
    known = set(AttributeStore(folder)) if names else set()
    if names and not known:
        raise InvalidInputError(
            f"There are no attributes in {folder.resolve()}. Say where they are, with --attributes."
        )
    if missing := [name for name in names if name not in known]:
        raise unknown_names(missing, known)
    return parsed


def _one_per_goal(values: Sequence[T], count: int, option: str) -> list[T]:
    """Return one value per goal; repeat a single value."""
    if len(values) not in (1, count):
        raise typer.BadParameter(f"{option} is given {len(values)} times, for {count} goals.")
    return list(values) if len(values) == count else list(values) * count
