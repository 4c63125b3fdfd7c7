"""`foretrace fit`: fit an attribute to scored texts, or one attribute per label."""

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretrace.cli.attribute import describe
from foretrace.cli.loading import choose_device, find_model, load_tokenizer
from foretrace.cli.terminal import ProgressBars

if TYPE_CHECKING:
    from foretrace.attribute import Attribute, FitConfig
    from foretrace.evaluate import Judge

EPILOG = (
    "Example: foretrace fit scored.jsonl --score toxicity --invert --tokenizer "
    "HuggingFaceTB/SmolLM2-135M --out nontoxic.safetensors"
)


class Objective(StrEnum):
    """What is fitted, and by which loss."""

    auto = "auto"
    cross_entropy = "cross-entropy"
    log_mse = "log-mse"
    evidence = "evidence"


def fit(
    data: Annotated[Path, typer.Argument(help="Texts: .jsonl, .csv, .parquet; also .xz, .gz.")],
    tokenizer: Annotated[
        str, typer.Option(help="The tokenizer of the LM to steer: a folder, or a hub id.")
    ],
    out: Annotated[Path, typer.Option(help="Output file; with --by, the output folder.")],
    text: Annotated[str, typer.Option(help="The column of texts.")] = "text",
    score: Annotated[str, typer.Option(help="The column of scores in [0, 1].")] = "score",
    invert: Annotated[
        bool, typer.Option(help="Use 1 - score: the scores are of the attribute's absence.")
    ] = False,
    by: Annotated[
        str | None, typer.Option(help="Fit one attribute per value of this column.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the attribute. Default: the file's name.")
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option(
            help="Score texts by module:function, or by a classifier: a folder, or a hub id."
        ),
    ] = None,
    label: Annotated[
        str | None,
        typer.Option(help="The class of the classifier; with --zero-shot, any description."),
    ] = None,
    zero_shot: Annotated[bool, typer.Option(help="The classifier is an entailment model.")] = False,
    encoder: Annotated[
        str | None, typer.Option(help="The sentence encoder of a judge that uses embeddings.")
    ] = None,
    judgements: Annotated[
        Path | None, typer.Option(help="Cache file of the judge's scores. Default: next to --out.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="Device of the classifier: cpu, cuda, or auto.")
    ] = "auto",
    objective: Annotated[
        Objective,
        typer.Option(
            help="cross-entropy: a product of weights, for what a text must avoid; log-mse: the "
            "paper's; evidence: log-odds, for what speaks for and against; auto: cross-entropy or "
            "evidence, by their ranks of held-out texts."
        ),
    ] = Objective.auto,
    terms: Annotated[int, typer.Option(help="Maximum number of terms in the mixture.")] = 1,
    scale: Annotated[float | None, typer.Option(help="Scale of the scores' transform.")] = None,
    shift: Annotated[float | None, typer.Option(help="Shift of the scores' transform.")] = None,
    penalty: Annotated[
        float, typer.Option(help="Penalty on the weights or rewards of rare tokens.")
    ] = 1.0,
    keep: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|groups",
            help="Words that must not decide, one per line, or 'groups': neutral terms for groups "
            "of people. Only words that are one token of the tokenizer are left out, in any "
            "capitalisation; list plurals as lines of their own.",
        ),
    ] = None,
    window: Annotated[int, typer.Option(help="Tokens per window; longer texts are split.")] = 128,
    seed: Annotated[int, typer.Option(help="Random seed of the held-out split.")] = 0,
    plot: Annotated[
        Path | None, typer.Option(help="Also write a plot of the fit to this PNG file.")
    ] = None,
) -> None:
    """Fit an attribute to scored texts. This takes about a second."""
    from foretrace import _tabular
    from foretrace.attribute import FitConfig, LogitAffine
    from foretrace.attribute.fitting.plot import draw
    from foretrace.evaluate import load_judge

    _check_options(
        out,
        by is not None,
        by=(invert, name, judge, plot),
        judge=(label, zero_shot, encoder, judgements),
    )
    transform = None
    if scale is not None or shift is not None:
        transform = LogitAffine(1.0 if scale is None else scale, shift or 0.0)
    config = FitConfig(
        objective=objective.value,
        terms=terms,
        transform=transform,
        penalty=penalty,
        seed=seed,
    )
    source: dict[str, Any] = {"data": data.name, "text": text, "window": window}
    target = by or (None if judge else score)
    rows = _tabular.read_rows(data, [text] if target is None else [text, target])
    texts = _tabular.texts(rows, text, data)
    fitter = _Fitter(tokenizer, window, config, _read_kept_words(keep))
    if keep is not None:
        source["keep"] = keep
    if by is not None:
        labels = [str(value) for value in _tabular.column(rows, by, data)]
        fitter.fit_labels(texts, labels, out, {**source, "by": by})
        return
    if judge is None:
        scores = _tabular.probabilities(rows, score, data)
        source["score"] = score
    else:
        if ":" not in judge:
            find_model(judge)
        if encoder is not None:
            find_model(encoder)
        loaded_judge = load_judge(
            judge,
            label=label,
            zero_shot=zero_shot,
            device=choose_device(device),
            encoder=encoder,
        )
        cache_file = judgements or out.with_suffix(".judgements.jsonl")
        total = len(texts)
        texts, scores = _judge(texts, loaded_judge, cache_file)
        source |= {"judge": judge, "label": label, "judge_failed": total - len(texts)}
    if invert:
        scores = [1 - value for value in scores]
    source["inverted"] = invert
    attribute = fitter.fit_scores(texts, scores, name or out.stem, out, source)
    if plot is not None:
        draw(attribute.config, plot)


def _check_options(out: Path, per_label: bool, by: tuple[Any, ...], judge: tuple[Any, ...]) -> None:
    """Raise an error for options without effect, and for an output that cannot be written."""
    if per_label and any(by):
        raise typer.BadParameter("--invert, --name, --judge and --plot have no meaning with --by.")
    if any(judge) and not by[2]:
        raise typer.BadParameter(
            "--label, --zero-shot, --encoder and --judgements are for a --judge."
        )
    if per_label and out.is_file():
        raise typer.BadParameter(f"--out {out} is a file; with --by it must be a folder.")
    if not per_label and out.is_dir():
        raise typer.BadParameter(f"--out {out} is a folder; name a file in it.")


class _Fitter:
    """Tokenizes texts, fits attributes, saves them and prints a summary."""

    def __init__(
        self, tokenizer: str, window: int, config: "FitConfig", kept_words: list[str]
    ) -> None:
        from foretrace.attribute import word_tokens
        from foretrace.vocabulary import tokenizer_settings

        self.tokenizer = load_tokenizer(tokenizer)
        self.window = window
        if kept_words:
            config = replace(config, keep=word_tokens(kept_words, self.tokenizer))
            typer.echo(f"{len(config.keep)} tokens of {len(kept_words)} words do not decide")
        self.settings = {
            "config": config,
            "tokenizer": self.tokenizer,
            **tokenizer_settings(self.tokenizer.get_vocab()),
        }

    def fit_scores(
        self, texts: list[str], scores: list[float], name: str, out: Path, source: dict[str, Any]
    ) -> "Attribute":
        """Fit one attribute to scores, save and describe it."""
        from foretrace.attribute import Attribute, tokenize

        windows = tokenize(texts, self.tokenizer, self.window)
        start = perf_counter()
        attribute = Attribute.fit(
            windows.token_ids,
            [scores[text] for text in windows.texts],
            groups=windows.texts,
            name=name,
            source=source,
            **self.settings,
        )
        seconds = perf_counter() - start
        attribute.save(out)
        describe(attribute, self.tokenizer)
        size = out.stat().st_size / 1000
        typer.echo(f"fitted in {seconds:.1f} s, written to {out} ({size:.1f} kB)")
        return attribute

    def fit_labels(
        self, texts: list[str], labels: list[str], out: Path, source: dict[str, Any]
    ) -> None:
        """Fit one attribute per label, and add them to a store."""
        from foretrace.attribute import Attribute, AttributeStore, tokenize

        store, names, aucs = AttributeStore(out), sorted(set(labels)), []
        attribute, num_warned = None, 0
        for label in names:
            store.path(label)  # raises an error for an invalid name before the fit
        windows = tokenize(texts, self.tokenizer, self.window)
        attributes = Attribute.fit_each(
            windows.token_ids,
            [labels[text] for text in windows.texts],
            groups=windows.texts,
            source=source,
            **self.settings,
        )
        with ProgressBars(resumes=False) as bars:
            for done, attribute in enumerate(attributes, 1):
                store.add(attribute)
                aucs.append(attribute.config.fit["auc"])
                num_warned += bool(attribute.config.fit["warnings"])
                bars.update("fit", done, len(names), "attributes")
        if attribute is not None and "reason" in attribute.config.fit:
            typer.echo(attribute.config.fit["reason"])
        known_aucs = [auc for auc in aucs if auc is not None] or [float("nan")]
        examples = ", ".join(f"'{name}'" for name in names[:3]) + (
            ", ..." if len(names) > 3 else ""
        )
        typer.echo(
            f"{len(names)} attributes in {out} ({examples}), median AUC on held-out texts "
            f"{median(known_aucs):.3f}"
        )
        if num_warned:
            typer.echo(
                f"Warning: {num_warned} of them have warnings, which `foretrace attribute show` "
                f"prints."
            )


def _read_kept_words(keep: str | None) -> list[str]:
    """Return the words of a file, or the terms for groups of people."""
    from foretrace.attribute import group_terms
    from foretrace.attribute.fitting.words import GROUPS, parse_words
    from foretrace.errors import reason

    if keep is None:
        return []
    if keep == GROUPS:
        return group_terms()
    try:
        words = parse_words(Path(keep).read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(
            f"--keep {keep} cannot be read ({reason(error)}). Pass a text file with one word "
            f"per line, or '{GROUPS}'."
        ) from error
    if not words:
        raise typer.BadParameter(f"--keep {keep} has no words. Write one per line.")
    return words


def _judge(texts: list[str], judge: "Judge", cache_file: Path) -> tuple[list[str], list[float]]:
    """Score texts; drop those that the judge fails on, and print how many."""
    from foretrace.attribute.fitting.examples import require_content
    from foretrace.errors import InvalidInputError
    from foretrace.evaluate import judge_texts

    require_content(texts)
    with ProgressBars(resumes=True) as bars:
        judged = judge_texts(
            texts,
            judge,
            cache=cache_file,
            on_progress=lambda done, total: bars.update("judge", done, total, "texts"),
        )
    pairs = zip(texts, judged.scores, strict=True)
    scored = [(text, score) for text, score in pairs if score is not None]
    if not scored:
        raise InvalidInputError(
            f"The judge '{judge.name}' scored none of {len(texts)} texts ({judged.last_failure}). "
            f"It must return a number in [0, 1] for each text."
        )
    if judged.failed:
        typer.echo(f"{judged.failed} texts left out: the judge failed ({judged.last_failure})")
    return [text for text, _ in scored], [score for _, score in scored]
