"""Options of `foretrace fit`, and which of them go together."""

from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from foretrace.cli.goal_options import DTYPE_HELP
from foretrace.gguf import is_gguf

_TextOption = partial(typer.Option, rich_help_panel="Texts")
_ScoreOption = partial(typer.Option, rich_help_panel="Scores")
_FitOption = partial(typer.Option, rich_help_panel="Fit")
_LMOption = partial(typer.Option, rich_help_panel="Language model")


class Objective(StrEnum):
    """What is fitted, and by which loss."""

    auto = "auto"
    cross_entropy = "cross-entropy"
    log_mse = "log-mse"
    evidence = "evidence"


Data = Annotated[
    Path | None,
    typer.Argument(
        help="Texts: .jsonl, .csv, .parquet; also .xz, .gz. Without it, the LM writes them: by "
        "--describe, or as samples for a scorer.",
        show_default=False,
    ),
]
Text = Annotated[str, _TextOption(help="The column of texts.")]
Describe = Annotated[
    str | None,
    _TextOption(
        metavar="WORDS",
        help="Write texts that fit these words, such as 'formal business English'. With {topic} in "
        "them, they are the whole instruction.",
    ),
]
Against = Annotated[
    str | None,
    _TextOption(
        metavar="WORDS",
        help="What the other texts are like, such as 'casual chat'. Default: texts about the same "
        "topics without a description.",
    ),
]
Topics = Annotated[
    Path | None,
    _TextOption(help="What to write about, one topic per line. Default: everyday things, English."),
]
NumTexts = Annotated[
    int | None,
    _TextOption(
        min=1, help="Texts to write.", show_default="1000 with --describe, 4000 for a scorer"
    ),
]
Prompts = Annotated[
    Path | None,
    _TextOption(
        help="Prompts that the LM continues, as samples to fit to and for the verdict: .jsonl, "
        ".csv, .txt. Default: openings that it writes."
    ),
]
WriterURL = Annotated[
    str | None,
    _TextOption(
        metavar="URL", help="Have a server with OpenAI's interface write, instead of the LM."
    ),
]
WriterModel = Annotated[str | None, _TextOption(help="The model on --writer-url.")]

Score = Annotated[str, _ScoreOption(help="The column of scores in [0, 1].")]
Invert = Annotated[
    bool, _ScoreOption(help="Use 1 - score: the scores are of the attribute's absence.")
]
By = Annotated[str | None, _ScoreOption(help="Fit one attribute per value of this column.")]
Scorer = Annotated[
    str | None,
    _ScoreOption(help="Score texts by module:function, or by a classifier: a folder, or a hub id."),
]
Label = Annotated[
    str | None,
    _ScoreOption(help="The class of the classifier; with --zero-shot, any description."),
]
ZeroShot = Annotated[bool, _ScoreOption(help="The classifier is an entailment model.")]
Encoder = Annotated[
    str | None, _ScoreOption(help="The sentence encoder of a scorer that uses embeddings.")
]
ScorerURL = Annotated[
    str | None,
    _ScoreOption(
        metavar="URL",
        help="Score texts by a model on a server with OpenAI's interface, such as "
        "http://localhost:8000/v1. OPENAI_API_KEY is its key.",
    ),
]
ScorerModel = Annotated[str | None, _ScoreOption(help="The model on --scorer-url.")]
ScorerPrompt = Annotated[
    str | None,
    _ScoreOption(
        metavar="QUESTION",
        help="A question that yes answers for texts with the attribute: 'Is this text formal?'",
    ),
]

Out = Annotated[Path, _FitOption(help="Output file; with --by, the output folder.")]
Name = Annotated[
    str | None, _FitOption(help="Name of the attribute. Default: the name of the output file.")
]
Objectives = Annotated[
    Objective,
    _FitOption(
        help="cross-entropy: a product of weights, for what a text must avoid; log-mse: the "
        "paper's; evidence: log-odds, for what speaks for and against; auto: evidence with --lm, "
        "else the one of both that ranks held-out texts better."
    ),
]
Terms = Annotated[int, _FitOption(help="Maximum number of terms in the mixture.")]
Scale = Annotated[float | None, _FitOption(help="Scale of the scores' transform.")]
Shift = Annotated[float | None, _FitOption(help="Shift of the scores' transform.")]
Penalty = Annotated[float, _FitOption(help="Penalty on the weights or rewards of rare tokens.")]
Keep = Annotated[
    str | None,
    _FitOption(
        metavar="FILE|groups",
        help="Words that must not decide, one per line, or 'groups': neutral terms for groups "
        "of people. Only words that are one token of the tokenizer are left out, in any "
        "capitalisation; list plurals as lines of their own. The words of --describe never decide.",
    ),
]
Window = Annotated[int, _FitOption(help="Tokens per window; longer texts are split.")]
Seed = Annotated[int, _FitOption(help="Random seed of the texts and of the held-out split.")]
Plot = Annotated[Path | None, _FitOption(help="Also write a plot of the fit to this PNG file.")]

LM = Annotated[
    str | None,
    _LMOption(
        help="The LM to steer: a folder, or a hub id. The command finds the strengths of levels "
        "with it, gives a verdict, and also fits to its samples. Rewards cost less at the same "
        "effect. Of a GGUF file, it uses the head and the frequencies of tokens alone."
    ),
]
HMM = Annotated[
    str | None,
    _LMOption(
        help="Its HMM: a folder, or a hub id. Without one, goals look at the next token alone. "
        "With --tokenizer, it makes rewards cost less."
    ),
]
Context = Annotated[
    bool,
    _LMOption(
        "--context",
        help="Also fit rewards that depend on what the LM makes of the text so far, and keep them "
        "if they help. This takes minutes.",
    ),
]
Tokenizer = Annotated[
    str | None, _LMOption(help="Instead of --lm, its tokenizer: a folder, or a hub id.")
]
Device = Annotated[str, _LMOption(help="Device of the LM and the classifier: cpu, cuda, or auto.")]
Dtype = Annotated[str, _LMOption(help=DTYPE_HELP)]


@dataclass(frozen=True)
class TextOptions:
    """Where texts come from."""

    data: Path | None
    column: str
    describe: str | None
    against: str | None
    topics: list[str] | None
    num_texts: int | None
    prompts: Path | None
    writer_url: str | None
    writer_model: str | None

    @property
    def sampled(self) -> bool:
        """Whether the texts are samples of the LM."""
        return self.data is None and self.describe is None


@dataclass(frozen=True)
class ScoreOptions:
    """Where scores come from."""

    column: str
    invert: bool
    by: str | None
    scorer: str | None
    label: str | None
    zero_shot: bool
    encoder: str | None
    url: str | None
    model: str | None
    prompt: str | None

    @property
    def scored(self) -> bool:
        """Whether a scorer scores the texts."""
        return self.scorer is not None or self.url is not None


def check(
    texts: TextOptions,
    scores: ScoreOptions,
    lm: str | None,
    context: bool,
    tokenizer: str | None,
    out: Path,
    single: tuple[str | Path | None, ...],
) -> None:
    """Raise an error for options that do not go together; `single` are those without --by."""
    described, sampled, by = texts.describe is not None, texts.sampled, scores.by is not None
    wrong = {
        "Pass a file of texts, --describe, or --lm with a scorer that scores its samples.": (
            sampled and not (lm and scores.scored)
        ),
        "A file has the texts already: leave out --describe and --num-texts.": (
            texts.data is not None and any((described, texts.num_texts))
        ),
        "--against, --topics, --writer-url and --writer-model are for --describe.": (
            not described
            and any((texts.against, texts.topics, texts.writer_url, texts.writer_model))
        ),
        "--prompts are for samples, or for the verdict, which needs --lm.": (
            texts.prompts is not None and not sampled and not lm
        ),
        "--describe needs --lm, or --writer-url: a language model writes the texts.": (
            described and not (lm or texts.writer_url)
        ),
        "--writer-url and --writer-model go together.": (
            (texts.writer_url is None) != (texts.writer_model is None)
        ),
        "--scorer-url, --scorer-model and --scorer-prompt go together.": (
            len({value is None for value in (scores.url, scores.model, scores.prompt)}) > 1
        ),
        "Pass --scorer or --scorer-url, not both.": bool(scores.scorer and scores.url),
        "--label, --zero-shot and --encoder are for a --scorer.": (
            scores.scorer is None and any((scores.label, scores.zero_shot, scores.encoder))
        ),
        "--by takes labels from a file. --describe, scorers, --invert, --name and --plot have no "
        "meaning with it.": by
        and any((texts.data is None, scores.scored, scores.invert, texts.prompts, *single)),
        "--context needs --lm, and fits one attribute: leave out --by.": (
            context and (by or not lm)
        ),
        "Pass --lm, or --tokenizer: an attribute belongs to a tokenizer.": not (lm or tokenizer),
        "A GGUF file neither writes texts nor gives a verdict here: leave out --prompts and "
        "--context, and pass texts or --writer-url. Or pass the LM as transformers has it.": (
            lm is not None
            and is_gguf(lm)
            and bool(sampled or context or texts.prompts or (described and not texts.writer_url))
        ),
        "--lm has its own tokenizer: leave out --tokenizer.": bool(lm and tokenizer),
        f"--out {out} is a file; with --by it must be a folder.": by and out.is_file(),
        f"--out {out} is a folder; name a file in it.": not by and out.is_dir(),
    }
    for message, applies in wrong.items():
        if applies:
            raise typer.BadParameter(message)


def read_words(file: Path, option: str) -> list[str]:
    """Read the words of a file, one per line."""
    from foretrace.attribute.fitting.words import parse_words
    from foretrace.errors import reason

    try:
        words = parse_words(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(
            f"{option} {file} cannot be read ({reason(error)}). Pass a text file with one entry "
            f"per line."
        ) from error
    if not words:
        raise typer.BadParameter(f"{option} {file} is empty. Write one entry per line.")
    return words
