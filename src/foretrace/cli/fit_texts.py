"""The texts and scores of `foretrace fit`: from a file, from the LM, from a scorer."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from foretrace.cli.fit_models import Models
from foretrace.cli.fit_options import ScoreOptions, TextOptions
from foretrace.cli.loading import choose_device, find_model, read_prompts
from foretrace.cli.terminal import ProgressBars

if TYPE_CHECKING:
    from foretrace.engines.transformers.writer import LMWriter
    from foretrace.engines.writing import Writer
    from foretrace.evaluate import Judge

NUM_DESCRIBED, NUM_SAMPLES = 1000, 4000


@dataclass(frozen=True)
class FitTexts:
    """Texts to fit to, as rows of `text` and, once they are known, `score` or `label`."""

    rows: list[dict[str, Any]]
    source: dict[str, Any]
    """Where texts and scores are from, to be stored with the attribute."""
    instruction_words: list[str] = field(default_factory=list)
    """Words of the instructions by which the texts were written."""

    @property
    def are_samples(self) -> bool:
        """Whether the LM has sampled the texts, so that more samples would teach nothing else."""
        return "samples" in self.source

    def column(self, name: str) -> list[Any]:
        """Return the values of a column."""
        return [row[name] for row in self.rows]


def read_texts(options: TextOptions, scores: ScoreOptions) -> FitTexts:
    """Read texts from a file, with scores or labels if the options name their column."""
    from foretrace import _tabular

    assert options.data is not None
    target = scores.by or (None if scores.scored else scores.column)
    source = {"data": options.data.name, "text": options.column}
    rows = _tabular.read_rows(options.data, [options.column, *([target] if target else [])])
    texts = _tabular.texts(rows, options.column, options.data)
    if target is None:
        return FitTexts([{"text": text} for text in texts], source)
    if scores.by:
        labels = map(str, _tabular.column(rows, target, options.data))
        fields: list[dict[str, Any]] = [{"label": label} for label in labels]
    else:
        numbers = _tabular.probabilities(rows, target, options.data)
        fields = [{"score": number} for number in numbers]
    source["by" if scores.by else "score"] = target
    pairs = zip(texts, fields, strict=True)
    return FitTexts([{"text": text, **values} for text, values in pairs], source)


def write_texts(options: TextOptions, models: Models, file: Path, seed: int) -> FitTexts:
    """Have texts written, by the LM or a server; `file` keeps what is written."""
    from foretrace.chat_server import ChatServer
    from foretrace.engines.writing import ServerWriter

    if options.writer_url is not None and options.writer_model is not None:
        server = ChatServer(options.writer_url, options.writer_model)
        return _describe_texts(options, ServerWriter(server), file, seed)
    from foretrace.engines.transformers.writer import LMWriter

    assert models.lm is not None
    ends = models.hmm.config.eos_token_ids if models.hmm else ()
    writer = LMWriter(models.lm, models.tokenizer, models.short_name, ends)
    if options.describe is not None:
        return _describe_texts(options, writer, file, seed)
    return _sample_texts(options, writer, file, seed)


def _describe_texts(options: TextOptions, writer: "Writer", file: Path, seed: int) -> FitTexts:
    """Have texts written from descriptions."""
    from foretrace.engines.contrast import instruction_words, summary, write_contrast

    assert options.describe is not None
    with ProgressBars(resumes=True) as bars:
        contrast = write_contrast(
            writer,
            options.describe,
            options.against,
            file,
            num_texts=options.num_texts or NUM_DESCRIBED,
            topics=options.topics,
            seed=seed,
            on_progress=lambda done, total: bars.update("write", done, total, "texts"),
        )
    if contrast.removed:
        typer.echo(f"removed: {summary(contrast.removed)}")
    source = {"described": options.describe, "against": options.against, "writer": writer.name}
    words = instruction_words(options.describe, options.against, options.topics)
    return FitTexts([text._asdict() for text in contrast.texts], source, words)


def _sample_texts(options: TextOptions, writer: "LMWriter", file: Path, seed: int) -> FitTexts:
    """Have the LM continue prompts, or openings that it writes."""
    from foretrace.engines.transformers.samples import sample_texts

    prompts = read_prompts(options.prompts) if options.prompts else []
    count = options.num_texts or NUM_SAMPLES
    with ProgressBars(resumes=True) as bars:
        drawn = sample_texts(writer, prompts, file, count=count, seed=seed, on_progress=bars.update)
    prompts_source = options.prompts.name if options.prompts else "openings of the language model"
    source = {"samples": writer.name, "prompts": prompts_source}
    return FitTexts([one._asdict() for one in drawn], source)


def score_texts(texts: FitTexts, options: ScoreOptions, device: str, cache: Path) -> FitTexts:
    """Have a scorer score texts; drop those that it fails on, and print how many."""
    from foretrace.attribute.fitting.examples import require_content
    from foretrace.errors import InvalidInputError
    from foretrace.evaluate import judge_texts

    contents = texts.column("text")
    require_content(contents)
    scorer = _load_scorer(options, device)
    with ProgressBars(resumes=True) as bars:
        judged = judge_texts(
            contents,
            scorer,
            cache=cache,
            on_progress=lambda done, total: bars.update("score", done, total, "texts"),
        )
    if judged.failed == len(contents):
        raise InvalidInputError(
            f"The scorer '{scorer.name}' scored none of {len(contents)} texts "
            f"({judged.last_failure}). It must return a number in [0, 1] for each text."
        )
    if judged.failed:
        typer.echo(f"{judged.failed} texts left out: the scorer failed ({judged.last_failure})")
    source = {"scorer": options.scorer or options.model, "score_failed": judged.failed}
    source |= {"label": options.label} if options.label else {}
    source |= {"question": options.prompt} if options.prompt else {}
    pairs = zip(texts.rows, judged.scores, strict=True)
    rows = [{**row, "score": score} for row, score in pairs if score is not None]
    return replace(texts, rows=rows, source={**texts.source, **source})


def _load_scorer(options: ScoreOptions, device: str) -> "Judge":
    from foretrace.chat_server import ChatServer
    from foretrace.evaluate import load_judge
    from foretrace.evaluate.server_judge import server_judge

    if options.url is not None and options.model is not None and options.prompt is not None:
        return server_judge(ChatServer(options.url, options.model), options.prompt)
    assert options.scorer is not None
    if ":" not in options.scorer:
        find_model(options.scorer)
    if options.encoder is not None:
        find_model(options.encoder)
    return load_judge(
        options.scorer,
        label=options.label,
        zero_shot=options.zero_shot,
        device=choose_device(device),
        encoder=options.encoder,
    )


def save_texts(texts: FitTexts, file: Path) -> None:
    """Write the texts that the LM wrote, to be read and corrected; never replace corrected ones."""
    from foretrace import _io
    from foretrace.errors import InvalidFileError

    if file.exists() and _io.read_lines(file) != texts.rows:
        raise InvalidFileError(
            f"{file} has other texts or scores than this command writes. To use them as they are, "
            f"run `foretrace fit {file}`; to replace them, remove the file."
        )
    _io.write_lines(file, texts.rows)
