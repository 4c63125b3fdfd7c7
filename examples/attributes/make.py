"""Make the attributes of this folder, calibrate them, and write the table of README.md.

    python examples/attributes/make.py DATA LM [--hmm HMM]

DATA is a folder with the tables that SOURCES names, LM the language model of the HMM. An attribute
whose file exists and was calibrated is not made again: delete the file to make it anew.
"""

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from foretrace import HMM, Attribute, AttributeStore, FitConfig, _tabular
from foretrace._hardware import default_dtype
from foretrace.attribute import group_terms, tokenize, word_tokens
from foretrace.context import Head, token_embeddings
from foretrace.engines.transformers.samples import Classifiers, TeachingSamples
from foretrace.engines.transformers.verdict import calibrate_and_report
from foretrace.vocabulary import tokenizer_settings

FOLDER = Path(__file__).parent
PROMPTS = "detox/train_prompts.jsonl.xz"
MARKERS = "<!-- begin table -->\n", "<!-- end table -->"


@dataclass(frozen=True)
class Source:
    """Where an attribute comes from: texts, and the probability that a row has the attribute."""

    train: str
    text: str
    score: Callable[[dict[str, Any]], float]
    test: str | None = None
    """A table to hold out; None for a tenth of the texts."""
    keep: bool = False
    """Whether terms for groups of people get no weight."""
    samples: bool = False
    """Whether rewards are also fitted to samples of the language model: where this was measured."""


DETOX, SST2 = "detox/train.jsonl.xz", "sentiment/sst2_train.jsonl.xz"
SST2_TEST, BBC = "sentiment/sst2_test.jsonl.xz", "politics/bbc_transfer.jsonl.xz"
NEWS, NEWS_TEST = "politics/train.jsonl.xz", "politics/test.jsonl.xz"
SOURCES = {
    "nontoxic": Source(
        DETOX, "text", lambda row: 1 - row["toxicity"], "detox/validation.jsonl.xz", keep=True
    ),
    "positive": Source(SST2, "text", lambda row: row["positive"], SST2_TEST, samples=True),
    "negative": Source(SST2, "text", lambda row: 1 - row["positive"], SST2_TEST, samples=True),
    "political": Source(
        NEWS, "description", lambda row: row["category"] == "POLITICS", NEWS_TEST, samples=True
    ),
    "entertainment": Source(BBC, "text", lambda row: row["topic"] == "entertainment"),
    "sport": Source(BBC, "text", lambda row: row["topic"] == "sport"),
    "technical": Source(BBC, "text", lambda row: row["topic"] == "tech"),
    "business": Source(BBC, "text", lambda row: row["topic"] == "business"),
}


class Maker:
    """Fits and calibrates attributes with one language model."""

    def __init__(self, data: Path, lm: str, hmm: HMM) -> None:
        self.data, self.lm, self.hmm = data, lm, hmm
        self.tokenizer = AutoTokenizer.from_pretrained(lm)
        self.settings = tokenizer_settings(self.tokenizer.get_vocab())

    def make(self, name: str, source: Source) -> Attribute:
        """Fit and calibrate an attribute."""
        texts, scores = self.read(source.train, source)
        teacher, judge = Classifiers.fit(self.model, self.tokenizer, texts, scores)
        samples = self.samples.scored(teacher) if teacher and source.samples else None
        return calibrate_and_report(
            self.model,
            self.tokenizer,
            self.hmm,
            self.fit(name, source, samples=samples, **self.lm_settings),
            prompts=self.prompts,
            judge=judge,
            source={"prompts": PROMPTS},
        )

    def fit(
        self,
        name: str,
        source: Source,
        frequencies: Tensor | None = None,
        embeddings: Tensor | None = None,
        samples: Any = None,
    ) -> Attribute:
        """Fit an attribute, without levels."""
        texts, scores = self.read(source.train, source)
        windows = tokenize(texts, self.tokenizer, 128)
        validation = None
        if source.test is not None:
            held_out, held_out_scores = self.read(source.test, source)
            pieces = tokenize(held_out, self.tokenizer, 128)
            validation = pieces.token_ids, [held_out_scores[text] for text in pieces.texts]
        return Attribute.fit(
            windows.token_ids,
            [scores[text] for text in windows.texts],
            config=FitConfig(keep=self._kept(source)),
            groups=windows.texts,
            validation=validation,
            frequencies=frequencies,
            embeddings=embeddings,
            samples=samples,
            name=name,
            source={"train": source.train, "held_out": source.test or "a tenth of the texts"},
            tokenizer=self.tokenizer,
            **self.settings,
        )

    @cached_property
    def lm_settings(self) -> dict[str, Tensor]:
        """What a fit uses of the language model's tokens."""
        embeddings = token_embeddings(Head.of_model(self.model, self.tokenizer))
        return {"frequencies": self.hmm.token_frequencies(), "embeddings": embeddings}

    @cached_property
    def prompts(self) -> list[str]:
        """The prompts that are continued, by the language model alone and steered."""
        return [row["prompt"] for row in _tabular.read_rows(self.data / PROMPTS, ["prompt"])]

    @cached_property
    def samples(self) -> TeachingSamples:
        """Texts of the language model, which the fits share."""
        file, ends = FOLDER / ".samples.jsonl", self.hmm.config.eos_token_ids
        # Other prompts than those of the calibration, which are the first.
        prompts = self.prompts[1000:]
        return TeachingSamples.draw(self.model, self.tokenizer, file, prompts=prompts, ends=ends)

    @cached_property
    def model(self) -> Any:
        """The language model, which is loaded when it is first needed."""
        return AutoModelForCausalLM.from_pretrained(self.lm, dtype=default_dtype("cpu"))

    def _kept(self, source: Source) -> list[int]:
        """Return the tokens that must not decide."""
        return word_tokens(group_terms(), self.tokenizer) if source.keep else []

    def read(self, file: str, source: Source) -> tuple[list[str], list[float]]:
        """Return the texts of a table and their scores."""
        rows = [row for row in _tabular.read_rows(self.data / file, []) if row[source.text]]
        return [row[source.text] for row in rows], [float(source.score(row)) for row in rows]


def table(store: AttributeStore, tokenizer: Any) -> str:
    """Return the table of README.md."""
    lines = [
        "| name | AUC | mild | medium | strong | at `strong` | tokens that decide | data |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, source in SOURCES.items():
        attribute = store[name]
        fit, levels = attribute.config.fit, attribute.config.levels
        without = float(attribute.probability([[]])[0])
        tokens = [
            tokenizer.decode([effect.token]).strip()
            for effect in attribute.top_tokens(4000)
            if effect.probability > without  # the others speak against the attribute
        ]
        words = [word for word in dict.fromkeys(tokens) if re.fullmatch(r"[a-z]{4,}", word)]
        shown = "(insults)" if name == "nontoxic" else ", ".join(words[:6])
        strengths = " | ".join(f"{levels[level]:.3g}" for level in ("mild", "medium", "strong"))
        outcome = attribute.report.outcome if attribute.report else "not measured"
        lines.append(
            f"| `{name}` | {fit['auc']:.3f} | {strengths} | {outcome} | {shown} | {source.train} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Make what is missing, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("lm")
    parser.add_argument("--hmm", default=str(FOLDER.parent / "smollm2-135m"))
    arguments = parser.parse_args()
    maker = Maker(arguments.data, arguments.lm, HMM.from_pretrained(arguments.hmm))
    store = AttributeStore(FOLDER)
    for name, source in SOURCES.items():
        if name not in store or not store[name].config.levels:
            store.add(maker.make(name, source))
            print(name, dict(store[name].config.levels), flush=True)  # noqa: T201
    readme = FOLDER / "README.md"
    before, _, rest = readme.read_text("utf-8").partition(MARKERS[0])
    after = rest.partition(MARKERS[1])[2]
    content = before + MARKERS[0] + table(store, maker.tokenizer) + MARKERS[1] + after
    readme.write_text(content, "utf-8")


if __name__ == "__main__":
    main()
