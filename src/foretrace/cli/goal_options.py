"""Options of commands that steer, and functions to load the HMM and the goals that they name."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from foretrace.attribute import LogitAffine
    from foretrace.hmm import HMM
    from foretrace.steering import Goal

MIN_CONSTRAINT_HORIZON = 64  # tokens
Model = Annotated[str, typer.Argument(help="The language model: a folder, or a hub id.")]
HMMSource = Annotated[str, typer.Option("--hmm", help="Its HMM: a folder, or a hub id.")]
GOAL = typer.Option(
    "--goal",
    help="Attributes joined by & | ~, such as 'nontoxic & ~formal'; repeatable: the factors of "
    "several goals are multiplied.",
)
Expressions = Annotated[list[str], GOAL]
MustContain = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="A text that must occur in the continuation; repeatable."),
]
MustNotContain = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT", help="A text that must not occur in the continuation; repeatable."
    ),
]


Attributes = Annotated[Path, typer.Option(help="The folder of attribute files.")]
Strengths = Annotated[
    list[float],
    typer.Option(
        "--strength",
        help="Scale of a goal's logit; above 1 steers more strongly. One value for all goals, or "
        "one per goal.",
    ),
]
Shifts = Annotated[
    list[float],
    typer.Option(
        "--shift", help="Added to a goal's scaled logit. One value for all goals, or one per goal."
    ),
]
Horizon = Annotated[int, typer.Option(min=0, help="Maximum number of tokens to look ahead.")]
NeutralEnd = Annotated[
    bool,
    typer.Option(
        help="Keep the LM's probability of the end-of-text token, so that texts do "
        "not end early to meet a goal."
    ),
]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Maximum number of tokens to generate.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy.")]
TopP = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="Nucleus sampling: the probability mass to keep.")
]
Seed = Annotated[int, typer.Option(help="Random seed; the same seed gives the same text.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto.")]
DTYPE_HELP = (
    "Dtype of the LM: float32, bfloat16, float16, or auto, which is bfloat16 unless the hardware "
    "lacks it."
)
Dtype = Annotated[str, typer.Option(help=DTYPE_HELP)]


def load_hmm(source: str, tokenizer: "PreTrainedTokenizerBase", device: "torch.device") -> "HMM":
    """Load an HMM, and check that it was made with this tokenizer."""
    from foretrace.hmm import HMM
    from foretrace.vocabulary import fingerprint

    expected = fingerprint(tokenizer.get_vocab())
    return HMM.from_pretrained(source, tokenizer_fingerprint=expected).to(device)


def build_transforms(
    strengths: list[float], shifts: list[float], goals: int
) -> "list[LogitAffine]":
    """Return the transform of each goal. Commands call this before they load the LM."""
    from foretrace.attribute import LogitAffine
    from foretrace.errors import InvalidInputError

    count = goals or 1  # constraints alone are one goal
    scales = _one_per_goal(strengths, count, "--strength")
    shifts = _one_per_goal(shifts, count, "--shift")
    try:
        return [LogitAffine(scale, shift) for scale, shift in zip(scales, shifts, strict=True)]
    except InvalidInputError as error:
        raise typer.BadParameter(
            f"--strength (the scale) and --shift: {error} To steer away from an attribute, negate "
            f"it: --goal '~name'."
        ) from error


def load_goals(
    hmm: "HMM",
    tokenizer: "PreTrainedTokenizerBase",
    folder: Path,
    expressions: list[str],
    transforms: "list[LogitAffine]",
    horizon: int,
    neutral_end: bool,
    must_contain: list[str] | None = None,
    must_not_contain: list[str] | None = None,
) -> "list[Goal]":
    """Build one goal per expression, and one for the constraints if there are any.

    The constraints are not transformed, unless there are no expressions.
    """
    from foretrace.attribute import AttributeStore, Expression, LogitAffine, parse
    from foretrace.engines.token_bytes import TokenBytes
    from foretrace.engines.vllm.params import constraint
    from foretrace.errors import InvalidInputError
    from foretrace.lookahead import Lookahead
    from foretrace.steering import Goal

    store = AttributeStore(folder, tokenizer_fingerprint=hmm.config.tokenizer_fingerprint)
    token_bytes = cache(TokenBytes.of)  # built at most once, and only if an expression needs it

    def build(expression: Expression, horizon: int) -> Lookahead:
        attribute = expression.build(
            store, lambda mention: token_bytes(tokenizer).mentions(mention.texts)
        )
        return Lookahead(hmm, attribute, horizon)

    parsed = [parse(text) for text in expressions]
    if any(expression.names for expression in parsed) and not any(True for _ in store):
        raise InvalidInputError(
            f"There are no attributes in {folder.resolve()}. Say where they are, with --attributes."
        )
    lookaheads = [build(expression, horizon) for expression in parsed]
    if must_contain or must_not_contain:
        # With a short horizon, steering would push a required text to occur too early.
        lookaheads.append(
            build(
                constraint(must_contain or [], must_not_contain or []),
                max(horizon, MIN_CONSTRAINT_HORIZON),
            )
        )
        transforms = [*transforms, LogitAffine()]
    return [
        Goal(lookahead, transform.scale, transform.shift, neutral_end)
        for lookahead, transform in zip(lookaheads, transforms, strict=False)
    ]


def _one_per_goal(values: list[float], count: int, option: str) -> list[float]:
    """Return one value per goal; repeat a single value."""
    if len(values) not in (1, count):
        raise typer.BadParameter(f"{option} is given {len(values)} times, for {count} goals.")
    return values if len(values) == count else values * count


def sampling_options(temperature: float, top_p: float) -> dict[str, object]:
    """Return the keyword arguments of `model.generate` for a temperature and a top-p."""
    if temperature == 0:
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    return {"do_sample": True, "temperature": temperature, "top_p": top_p}
