"""What verbs that steer have in common: the goals, and how to write."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from foretrace.hmm import HMM
    from foretrace.steering import Goal

FAR = 64  # tokens: how far ahead what must occur is looked for
Model = Annotated[str, typer.Argument(help="The language model: a folder, or a hub id.")]
HMMSource = Annotated[str, typer.Option("--hmm", help="Its HMM: a folder, or a hub id.")]
GOAL = typer.Option(
    "--goal", help="Attributes joined by & | ~, as 'nontoxic & ~formal'; several multiply."
)
Expressions = Annotated[list[str], GOAL]
MustContain = Annotated[
    list[str] | None, typer.Option(metavar="TEXT", help="What must occur in the text; each does.")
]
MustNotContain = Annotated[
    list[str] | None, typer.Option(metavar="TEXT", help="What must not; none of them does.")
]


def _above_zero(values: list[float]) -> list[float]:
    for value in values:
        if not value > 0:
            raise typer.BadParameter(
                f"--strength must be above 0, not {value:g}. To steer away, write --goal '~a'."
            )
    return values


Attributes = Annotated[Path, typer.Option(help="The folder of the attributes' files.")]
Strengths = Annotated[
    list[float],
    typer.Option(
        "--strength", help="How strongly: for all goals, or for each.", callback=_above_zero
    ),
]
Shifts = Annotated[list[float], typer.Option("--shift", help="Added to a goal's logit; as above.")]
Horizon = Annotated[int, typer.Option(min=0, help="How many tokens to look ahead at most.")]
NeutralEnd = Annotated[
    bool, typer.Option(help="Let texts end as often as bare ones do: no escape from the goal.")
]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Tokens to write at most.")]
Temperature = Annotated[
    float, typer.Option(min=0.0, help="Of sampling; 0 takes the likeliest token.")
]
TopP = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="Sample from this much of the probability.")
]
Seed = Annotated[int, typer.Option(help="The same seed writes the same text.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto.")]
Dtype = Annotated[str, typer.Option(help="Of the language model: float32, bfloat16, or auto.")]


def load_hmm(source: str, tokenizer: "PreTrainedTokenizerBase", device: "torch.device") -> "HMM":
    """Load the HMM of the tokenizer's LM; that of another one is refused."""
    from foretrace.hmm import HMM
    from foretrace.vocabulary import fingerprint

    known = fingerprint(tokenizer.get_vocab())
    return HMM.from_pretrained(source, tokenizer_fingerprint=known).to(device)


def load_goals(
    hmm: "HMM",
    tokenizer: "PreTrainedTokenizerBase",
    folder: Path,
    expressions: list[str],
    strengths: list[float],
    shifts: list[float],
    horizon: int,
    neutral_end: bool,
    must: list[str] | None = None,
    must_not: list[str] | None = None,
) -> "list[Goal]":
    """Build the goals that were asked for, each with its strength and shift; constraints last."""
    from foretrace.attribute import AttributeStore, Expression, parse
    from foretrace.engines.token_bytes import TokenBytes
    from foretrace.engines.vllm.params import constraint
    from foretrace.errors import InvalidInputError
    from foretrace.lookahead import Lookahead
    from foretrace.steering import Goal

    store = AttributeStore(folder, tokenizer_fingerprint=hmm.config.tokenizer_fingerprint)
    spelling = cache(TokenBytes.of)  # if it is needed at all, and then once

    def lookahead(expression: Expression, reach: int = horizon) -> Lookahead:
        built = expression.build(store, lambda each: spelling(tokenizer).mentions(each.texts))
        return Lookahead(hmm, built, reach)

    parsed = [parse(text) for text in expressions]
    if any(each.names for each in parsed) and not any(True for _ in store):
        raise InvalidInputError(
            f"There are no attributes in {folder.resolve()}. Say where they are, with --attributes."
        )
    lookaheads = [lookahead(each) for each in parsed]
    count = len(expressions) or 1  # constraints alone are a goal, too
    own, more = _for_each(strengths, count, "--strength"), _for_each(shifts, count, "--shift")
    if must or must_not:
        # It may come at any time: who looks less far ahead would want it sooner.
        lookaheads.append(lookahead(constraint(must or [], must_not or []), max(horizon, FAR)))
        own, more = [*own, 1.0], [*more, 0.0]
    transforms = zip(own, more, strict=True)
    return [Goal(each, *next(transforms), neutral_end) for each in lookaheads]


def _for_each(values: list[float], count: int, option: str) -> list[float]:
    """Give every goal its own value; one is for all."""
    if len(values) not in (1, count):
        raise typer.BadParameter(f"{option} is given {len(values)} times, for {count} goals.")
    return values if len(values) == count else values * count


def sampling(temperature: float, top_p: float) -> dict[str, object]:
    """Say to transformers how tokens are chosen."""
    if temperature == 0:
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    return {"do_sample": True, "temperature": temperature, "top_p": top_p}
