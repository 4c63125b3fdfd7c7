"""`foretrace fit`: from texts and scores to an attribute, or to one for every label."""

from enum import StrEnum
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretrace.cli.attribute import describe
from foretrace.cli.device import choose_device
from foretrace.cli.model_loading import load_tokenizer
from foretrace.cli.progress import Bars

if TYPE_CHECKING:
    from foretrace.attribute import Attribute, FitConfig
    from foretrace.evaluate import Judge

EPILOG = (
    "Example: foretrace fit scored.jsonl --score toxicity --invert --tokenizer "
    "HuggingFaceTB/SmolLM2-135M --out nontoxic.safetensors"
)


class Objective(StrEnum):
    """What is fitted by."""

    cross_entropy = "cross-entropy"
    log_mse = "log-mse"


def fit(
    data: Annotated[Path, typer.Argument(help="Texts: .jsonl, .csv, .parquet; also .xz, .gz.")],
    tokenizer: Annotated[str, typer.Option(help="Of the LM to steer: a folder, or a hub id.")],
    out: Annotated[Path, typer.Option(help="The file to write; with --by, the folder.")],
    text: Annotated[str, typer.Option(help="The column of texts.")] = "text",
    score: Annotated[str, typer.Option(help="The column of scores in [0, 1].")] = "score",
    invert: Annotated[bool, typer.Option(help="Scores are of not having it.")] = False,
    by: Annotated[
        str | None, typer.Option(help="Fit one attribute for every value of this column.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="What to call it, if not as the file.")] = None,
    judge: Annotated[
        str | None, typer.Option(help="Score by module:function, or a classifier's folder or id.")
    ] = None,
    label: Annotated[str | None, typer.Option(help="The classifier's class, or words.")] = None,
    zero_shot: Annotated[bool, typer.Option(help="The classifier is one of entailment.")] = False,
    encoder: Annotated[
        str | None, typer.Option(help="The sentence encoder of a judge that uses embeddings.")
    ] = None,
    judgements: Annotated[
        Path | None, typer.Option(help="Where the judge's scores are kept; else beside --out.")
    ] = None,
    device: Annotated[str, typer.Option(help="The classifier's: cpu, cuda, or auto.")] = "auto",
    objective: Annotated[Objective, typer.Option(help="What to fit by.")] = Objective.cross_entropy,
    terms: Annotated[int, typer.Option(help="Products in the mixture, at most.")] = 1,
    by_absence: Annotated[
        bool | None, typer.Option(help="Fit the absence and negate; so by default with --by.")
    ] = None,
    scale: Annotated[float | None, typer.Option(help="Of the scores' transform.")] = None,
    shift: Annotated[float | None, typer.Option(help="Of the scores' transform.")] = None,
    penalty: Annotated[float, typer.Option(help="Against weights from few texts.")] = 1.0,
    window: Annotated[int, typer.Option(help="Most tokens of a text to take at once.")] = 128,
    seed: Annotated[int, typer.Option(help="Decides which texts are held out.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Also draw the fit, as this PNG.")] = None,
) -> None:
    """Fit an attribute to scored texts, in about a second."""
    from foretrace import _tabular
    from foretrace.attribute import FitConfig, LogitAffine
    from foretrace.attribute.fitting.plot import draw
    from foretrace.evaluate import load_judge

    _require_fitting_options(
        out,
        by is not None,
        by=(invert, name, judge, plot),
        judge=(label, zero_shot, encoder, judgements),
    )
    chosen = scale is None and shift is None
    config = FitConfig(
        objective=objective.value,
        terms=terms,
        transform=None if chosen else LogitAffine(1.0 if scale is None else scale, shift or 0.0),
        by_absence=by is not None if by_absence is None else by_absence,
        penalty=penalty,
        seed=seed,
    )
    source = {"data": data.name, "text": text, "window": window}
    target = by or (None if judge else score)
    rows = _tabular.read_rows(data, [text] if target is None else [text, target])
    texts = _tabular.texts(rows, text, data)
    fitting = _Fitting(tokenizer, window, config)
    if by is not None:
        labels = [str(value) for value in _tabular.column(rows, by, data)]
        fitting.each(texts, labels, out, {**source, "by": by})
        return
    if judge is None:
        scores = _tabular.probabilities(rows, score, data)
        source["score"] = score
    else:
        loaded = load_judge(
            judge,
            label=label,
            zero_shot=zero_shot,
            device=choose_device(device),
            encoder=encoder,
        )
        kept = judgements or out.with_suffix(".judgements.jsonl")
        total = len(texts)
        texts, scores = _judged(texts, loaded, kept)
        source |= {"judge": judge, "label": label, "judge_failed": total - len(texts)}
    if invert:
        scores = [1 - value for value in scores]
    source["inverted"] = invert
    attribute = fitting.one(texts, scores, name or out.stem, out, source)
    if plot is not None:
        draw(attribute.config, plot)


def _require_fitting_options(
    out: Path, each: bool, by: tuple[Any, ...], judge: tuple[Any, ...]
) -> None:
    """Refuse options that would have no effect, and an output that cannot be written."""
    if each and any(by):
        raise typer.BadParameter("--invert, --name, --judge and --plot have no meaning with --by.")
    if any(judge) and not by[2]:
        raise typer.BadParameter(
            "--label, --zero-shot, --encoder and --judgements are for a --judge."
        )
    if each and out.is_file():
        raise typer.BadParameter(f"--out {out} is a file; with --by it must be a folder.")
    if not each and out.is_dir():
        raise typer.BadParameter(f"--out {out} is a folder; name a file in it.")


class _Fitting:
    """Tokenizes, fits, writes and tells."""

    def __init__(self, tokenizer: str, window: int, config: "FitConfig") -> None:
        from foretrace.vocabulary import tokenizer_settings

        self.tokenizer = load_tokenizer(tokenizer)
        self.window = window
        self.settings = {"config": config, **tokenizer_settings(self.tokenizer.get_vocab())}

    def one(
        self, texts: list[str], scores: list[float], name: str, out: Path, source: dict[str, Any]
    ) -> "Attribute":
        """Fit one attribute to scores."""
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
        taken = perf_counter() - start
        attribute.save(out)
        describe(attribute, self.tokenizer)
        size = out.stat().st_size / 1000
        typer.echo(f"fitted in {taken:.1f} s, written to {out} ({size:.1f} kB)")
        return attribute

    def each(self, texts: list[str], labels: list[str], out: Path, source: dict[str, Any]) -> None:
        """Fit one attribute for every label, and put them into a store."""
        from foretrace.attribute import Attribute, AttributeStore, tokenize

        store, names, ranks = AttributeStore(out), sorted(set(labels)), []
        for label in names:
            store.path(label)  # refuses what cannot be a name, before the work
        windows = tokenize(texts, self.tokenizer, self.window)
        attributes = Attribute.fit_each(
            windows.token_ids,
            [labels[text] for text in windows.texts],
            groups=windows.texts,
            source=source,
            **self.settings,
        )
        with Bars(resumes=False) as bars:
            for done, attribute in enumerate(attributes, 1):
                store.add(attribute)
                ranks.append(attribute.config.fit["auc"])
                bars.show("fit", done, len(names), "attributes")
        found = [rank for rank in ranks if rank is not None] or [float("nan")]
        some = ", ".join(f"'{name}'" for name in names[:3]) + (", ..." if len(names) > 3 else "")
        typer.echo(
            f"{len(names)} attributes in {out} ({some}), median AUC on held-out texts "
            f"{median(found):.3f}"
        )


def _judged(texts: list[str], judge: "Judge", kept: Path) -> tuple[list[str], list[float]]:
    """Score texts; leave out those that could not be judged, and say how many."""
    from foretrace.attribute.fitting.tokenize import require_content
    from foretrace.errors import InvalidInputError
    from foretrace.evaluate import judge_texts

    require_content(texts)
    with Bars() as bars:
        found = judge_texts(
            texts,
            judge,
            cache=kept,
            observe=lambda done, total: bars.show("judge", done, total, "texts"),
        )
    pairs = zip(texts, found.scores, strict=True)
    scored = [(text, score) for text, score in pairs if score is not None]
    if not scored:
        raise InvalidInputError(
            f"The judge '{judge.name}' scored none of {len(texts)} texts ({found.last_failure}). "
            f"It must give a number in [0, 1] for each text that it gets."
        )
    if found.failed:
        typer.echo(f"{found.failed} texts left out: the judge failed ({found.last_failure})")
    return [text for text, _ in scored], [score for _, score in scored]
