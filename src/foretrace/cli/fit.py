"""`foretrace fit`: fit an attribute to texts, or one attribute per label."""

from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

import typer

from foretrace.cli import fit_options as options
from foretrace.cli import fit_texts
from foretrace.cli.attribute import describe as print_attribute
from foretrace.cli.fit_models import Models, Teaching
from foretrace.cli.fit_options import Objective, ScoreOptions, TextOptions
from foretrace.cli.fit_texts import FitTexts
from foretrace.cli.loading import read_prompts
from foretrace.cli.terminal import ProgressBars

if TYPE_CHECKING:
    from foretrace.attribute import Attribute, FitConfig
    from foretrace.attribute.token_ids import Texts

EPILOG = (
    "Example: foretrace fit scored.jsonl --score toxicity --invert --tokenizer "
    "HuggingFaceTB/SmolLM2-135M --out nontoxic.safetensors"
)


def fit(
    out: options.Out,
    data: options.Data = None,
    text: options.Text = "text",
    describe: options.Describe = None,
    against: options.Against = None,
    topics: options.Topics = None,
    num_texts: options.NumTexts = None,
    prompts: options.Prompts = None,
    writer_url: options.WriterURL = None,
    writer_model: options.WriterModel = None,
    score: options.Score = "score",
    invert: options.Invert = False,
    by: options.By = None,
    scorer: options.Scorer = None,
    label: options.Label = None,
    zero_shot: options.ZeroShot = False,
    encoder: options.Encoder = None,
    scorer_url: options.ScorerURL = None,
    scorer_model: options.ScorerModel = None,
    scorer_prompt: options.ScorerPrompt = None,
    name: options.Name = None,
    objective: options.Objectives = Objective.auto,
    terms: options.Terms = 1,
    scale: options.Scale = None,
    shift: options.Shift = None,
    penalty: options.Penalty = 1.0,
    keep: options.Keep = None,
    window: options.Window = 128,
    seed: options.Seed = 0,
    plot: options.Plot = None,
    lm: options.LM = None,
    hmm: options.HMM = None,
    context: options.Context = False,
    tokenizer: options.Tokenizer = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
) -> None:
    """Fit an attribute: to scored texts, to a description, or to the scores of a scorer."""
    from foretrace.attribute import FitConfig, LogitAffine
    from foretrace.attribute.fitting.plot import draw

    topic_list = None if topics is None else options.read_words(topics, "--topics")
    text_options = TextOptions(
        data, text, describe, against, topic_list, num_texts, prompts, writer_url, writer_model
    )
    score_options = ScoreOptions(
        score, invert, by, scorer, label, zero_shot, encoder, scorer_url, scorer_model,
        scorer_prompt,
    )  # fmt: skip
    options.check(text_options, score_options, lm, context, tokenizer, out, (name, plot))
    transform = None
    if scale is not None or shift is not None:
        transform = LogitAffine(1.0 if scale is None else scale, shift or 0.0)
    config = FitConfig(
        objective=objective.value, terms=terms, transform=transform, penalty=penalty, seed=seed
    )
    kept_words = _read_kept_words(keep)
    texts = None if data is None else fit_texts.read_texts(text_options, score_options)
    models = Models.load(lm, tokenizer or "", hmm, device, dtype)
    if texts is None:
        texts = fit_texts.write_texts(text_options, models, out.with_suffix(".written.jsonl"), seed)
    texts.source.update({"window": window} | ({} if keep is None else {"keep": keep}))
    fitter = _Fitter(models, window, config, [*kept_words, *texts.instruction_words])
    if by is not None:
        fitter.fit_labels(texts, out)
        return
    if score_options.scored:
        cache = out.with_suffix(".scores.jsonl")
        texts = fit_texts.score_texts(texts, score_options, device, cache)
    if data is None:
        fit_texts.save_texts(texts, out.with_suffix(".texts.jsonl"))
    scores = [1 - value if invert else value for value in texts.column("score")]
    texts.source["inverted"] = invert
    prompt_texts = read_prompts(prompts) if prompts else []
    teaching = Teaching()
    if models.lm is not None:
        teachable = objective in (Objective.auto, Objective.evidence) and terms == 1
        teachable = teachable and not texts.are_samples
        # In one file for all attributes of the folder: samples depend on the LM and the prompts.
        file = out.with_name(".samples.jsonl") if teachable else None
        teaching = models.teach(texts.column("text"), scores, prompt_texts, file, seed)
    attribute = fitter.fit_scores(
        texts, scores, name or out.stem, out, prompt_texts, teaching.samples
    )
    if plot is not None:
        draw(attribute.config, plot)
    if models.lm is not None and attribute.has_power and attribute.has_weights:
        name_of_prompts = f"{prompts}" if prompts else "openings of the language model"
        measured = models.measure(
            attribute,
            teaching.judge,
            texts.column("text"),
            scores,
            prompt_texts,
            name_of_prompts,
            seed,
            states=out.with_suffix(".states") if context else None,
            keep=fitter.keep,
        )
        measured.save(out)


class _Fitter:
    """Tokenizes texts, fits attributes, saves them and prints a summary.

    Attributes:
        keep: The tokens that must not decide.
    """

    def __init__(
        self, models: Models, window: int, config: "FitConfig", kept_words: list[str]
    ) -> None:
        from foretrace.attribute import word_tokens
        from foretrace.vocabulary import tokenizer_settings

        self.tokenizer, self.window = models.tokenizer, window
        if kept_words:
            config = replace(config, keep=word_tokens(kept_words, self.tokenizer))
            typer.echo(f"{len(config.keep)} tokens of {len(kept_words)} words do not decide")
        self.keep = config.keep
        self.settings = {
            "config": config,
            "tokenizer": self.tokenizer,
            "frequencies": None if models.hmm is None else models.hmm.token_frequencies().cpu(),
            "embeddings": models.token_embeddings(),
            **tokenizer_settings(self.tokenizer.get_vocab()),
        }

    def fit_scores(
        self,
        texts: FitTexts,
        scores: list[float],
        name: str,
        out: Path,
        prompts: list[str],
        samples: "tuple[Texts, list[float]] | None",
    ) -> "Attribute":
        """Fit one attribute to scores, save and describe it."""
        from foretrace.attribute import Attribute, tokenize

        windows = tokenize(texts.column("text"), self.tokenizer, self.window)
        start = perf_counter()
        attribute = Attribute.fit(
            windows.token_ids,
            [scores[text] for text in windows.texts],
            groups=windows.texts,
            samples=samples,
            name=name,
            source=texts.source,
            prompts=tokenize(prompts, self.tokenizer).token_ids if prompts else None,
            **self.settings,
        )
        seconds = perf_counter() - start
        attribute.save(out)
        print_attribute(attribute, self.tokenizer)
        size = out.stat().st_size / 1000
        typer.echo(f"fitted in {seconds:.1f} s, written to {out} ({size:.1f} kB)")
        return attribute

    def fit_labels(self, texts: FitTexts, out: Path) -> None:
        """Fit one attribute per label, and add them to a store."""
        from foretrace.attribute import Attribute, AttributeStore, tokenize

        labels = texts.column("label")
        store, names, aucs = AttributeStore(out), sorted(set(labels)), []
        attribute, num_warned = None, 0
        for label in names:
            store.path(label)  # raises an error for an invalid name before the fit
        windows = tokenize(texts.column("text"), self.tokenizer, self.window)
        attributes = Attribute.fit_each(
            windows.token_ids,
            [labels[text] for text in windows.texts],
            groups=windows.texts,
            source=texts.source,
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
    from foretrace.attribute.fitting.words import GROUPS

    if keep is None:
        return []
    return group_terms() if keep == GROUPS else options.read_words(Path(keep), "--keep")
