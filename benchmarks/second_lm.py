"""Make attributes for a second LM that has no HMM, and steer it.

FORETRACE_LM names the folder of the LM, or a GGUF file, which is dequantised. Without native
bfloat16, its linear layers run in 8-bit integers. FORETRACE_DATA names the folder of data,
FORETRACE_ENCODER the sentence encoder of the judges, and FORETRACE_OUT a folder that keeps what
takes time: an interrupted run resumes from it. *Positive* is fitted to SST-2, and all others to
texts that the LM writes from the descriptions of `descriptions.py`. SmolLM2 is also steered, by its
own texts and by those of the second LM. --quick steers SmolLM2 alone, on a few prompts. Install
first:

    pip install vaderSentiment gguf
    pip install --no-deps -r benchmarks/peers/requirements-control-vectors.txt
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
from sklearn.metrics import roc_auc_score
from transformers import AutoModelForCausalLM, AutoTokenizer

from descriptions import DESCRIPTIONS, JUDGE_TEXTS, REVIEW_TEXTS, Description
from foretrace import HMM, Attribute, Compiler, FitConfig, Goal, _io
from foretrace._hardware import default_dtype
from foretrace._tabular import read_rows
from foretrace.attribute import tokenize, word_tokens
from foretrace.context import read_head, token_embeddings
from foretrace.engines.contrast import instruction_words, write_contrast
from foretrace.engines.prompts import Goals, decode_after, encode_prompts
from foretrace.engines.transformers import stop_tokens, unigram_hmm
from foretrace.engines.transformers.calibration import SteeredRuns, calibrate
from foretrace.engines.transformers.writer import LMWriter
from foretrace.evaluate import metrics
from foretrace.evaluate.linear_judge import LinearJudge
from foretrace.evaluate.perplexity import token_nll
from foretrace.evaluate.preparation import goal_checksum
from foretrace.evaluate.suite import AttributePlan
from foretrace.gguf import is_gguf
from foretrace.lookahead.levels import BUDGETS
from foretrace.lookahead.strengths import HMMPrices
from foretrace.vocabulary import tokenizer_settings
from harness import Report, options
from int8 import quantise
from peers.control_vectors import VECTOR, build, train_vector
from peers.parts import part
from peers.scores import score_rows
from peers.sides import Sides, read_sides
from smollm2 import dequantise, find_smollm2

TRAIN, PROMPTS = "sentiment/sst2_train.jsonl.xz", "sentiment/prompts.jsonl.xz"
CALIBRATION = "detox/train_prompts.jsonl.xz"
TOP_P = 0.9
LEVELS = {name: BUDGETS[name] for name in ("medium", "strong")}
COEFFICIENTS = 0.1, 0.2
WRITTEN = ", written"  # the end of an attribute's name that is fitted to texts of an LM
NAMES = "positive", "sea" + WRITTEN, "positive" + WRITTEN, "formal" + WRITTEN


class Sizes(NamedTuple):
    """How much is generated."""

    written: int = 200  # texts of a description, of both sides
    frequencies: int = 32  # tokens of each of the texts in which frequencies are measured
    calibration: int = 32  # prompts
    prompts: int = 30
    batch: int = 15  # prompts that are continued at once
    copies: int = 5
    tokens: int = 20
    pairs: int = 100  # of texts that a control vector is trained on


QUICK = Sizes(32, 4, 2, 2, 2, 2, 6, 8)


class Method(NamedTuple):
    """A way to generate: at a level of steering, by a prompt, or with a control vector."""

    level: str | None = None
    instruction: str = "{prompt}"
    coefficient: float | None = None


class KeptRuns(SteeredRuns):
    """Steered runs that keep their prices in a file."""

    file: Path

    def price(self, goal: Goals) -> float:
        """Return the mean price of a token; measure it if the file does not have it."""
        assert goal is not None
        assert not isinstance(goal, Sequence)
        key, known = repr(goal_checksum(goal)), {}
        if self.file.is_file():
            known = _io.read_json(self.file)
        if key not in known:
            known[key] = super().price(goal)
            _io.write_json(self.file, known)
        return float(known[key])


@dataclass(frozen=True)
class SecondLM:
    """An LM without an HMM, and a folder that keeps its attributes and its texts."""

    source: Path
    data: Path
    out: Path
    sizes: Sizes

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Keep how long something took."""
        start = perf_counter()
        yield
        file = self.out / "seconds.json"
        known = _io.read_json(file) if file.is_file() else {}
        _io.write_json(file, {**known, name: perf_counter() - start})

    @cached_property
    def folder(self) -> Path:
        """The folder of the LM."""
        if not is_gguf(str(self.source)):
            return self.source
        folder = self.out / self.source.stem
        if not folder.exists():
            with self.timed("dequantise"):
                dequantise(self.source, folder, default_dtype("cpu"))
        return folder

    @cached_property
    def lm(self) -> Any:
        """The LM, in the fastest type of the CPU."""
        dtype = default_dtype("cpu")
        lm = AutoModelForCausalLM.from_pretrained(self.folder, dtype=dtype)
        if dtype == torch.float32:
            quantise(lm)
        return lm

    @cached_property
    def tokenizer(self) -> Any:
        """Its tokenizer."""
        return AutoTokenizer.from_pretrained(self.folder)

    @cached_property
    def hmm(self) -> HMM:
        """The frequencies of its tokens."""
        folder = self.out / "frequencies"
        if not folder.exists():
            with self.timed("frequencies"):
                hmm = unigram_hmm(self.lm, self.tokenizer, length=self.sizes.frequencies)
            hmm.save_pretrained(folder)
        return HMM.from_pretrained(folder)

    @cached_property
    def ends(self) -> list[int]:
        """The tokens that end a text."""
        begin = self.tokenizer.bos_token_id  # of the next text
        more = [] if begin is None else [begin]
        return stop_tokens(self.lm.generation_config, [*self.hmm.config.eos_token_ids, *more])

    def encode(self, prompts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of prompts."""
        return encode_prompts(self.tokenizer, prompts)

    def attribute(self, name: str) -> Attribute:
        """Return an attribute with the strengths of its levels."""
        file = self.out / f"{name}.safetensors"
        if not file.exists():
            with self.timed(f"{name}: fit"):
                self._fit(name).save(file)
        attribute = Attribute.load(file)
        if not attribute.config.levels:
            with self.timed(f"{name}: levels"):
                found = calibrate(self._runs(name), self.hmm, attribute, LEVELS)
            levels = {level: one.strength for level, one in found.items()}
            attribute = replace(attribute, config=replace(attribute.config, levels=levels))
            attribute.save(file)
        return attribute

    def _fit(self, name: str) -> Attribute:
        keep: list[str] = []
        if name.endswith(WRITTEN):
            rows = self.write(name)
            scores = [float(row["score"]) for row in rows]
            description = description_of(name)
            keep = instruction_words(description.wish, description.against)
        else:
            rows = read_rows(self.data / TRAIN, ["text", "positive"])
            scores = [float(row["positive"]) for row in rows]
        windows = tokenize([row["text"] for row in rows], self.tokenizer)
        return Attribute.fit(
            windows.token_ids,
            [scores[text] for text in windows.texts],
            groups=windows.texts,
            config=FitConfig(keep=word_tokens(keep, self.tokenizer)),
            frequencies=self.hmm.token_frequencies(),
            embeddings=token_embeddings(read_head(self.folder)),
            name=name,
            tokenizer=self.tokenizer,
            **tokenizer_settings(self.tokenizer.get_vocab()),
        )

    def texts(self, name: str) -> Path:
        """Return the file of the texts that an LM has written."""
        return self.out / f"{name}.texts.jsonl"

    def write(self, name: str) -> list[dict[str, Any]]:
        """Have the LM write the texts of a description, unless it has done so."""
        file = self.texts(name)
        if not file.exists():
            written = file.with_name(f"{name}.jsonl")
            writer = LMWriter(self.lm, self.tokenizer, self.folder.name, self.ends)
            wish, against, _ = description_of(name)
            with self.timed(f"{name}: texts"):
                contrast = write_contrast(
                    writer, wish, against, written, num_texts=self.sizes.written
                )
            _io.write_lines(file, [text._asdict() for text in contrast.texts])
        return read_rows(file, ["text", "score"])

    def _runs(self, name: str) -> KeptRuns:
        """Return the runs that measure prices, of prompts that are not evaluated."""
        rows = read_rows(self.data / CALIBRATION, ["prompt"])[: self.sizes.calibration]
        ids = self.encode([row["prompt"] for row in rows])
        runs = KeptRuns(self.lm, ids, ends=self.ends, max_new_tokens=self.sizes.tokens)
        runs.file = self.out / f"{name}.prices.json"
        return runs

    def hook(self, name: str, coefficient: float | None) -> AbstractContextManager[Any]:
        """Return the context in which a control vector is added."""
        if coefficient is None:
            return nullcontext()
        os.environ["FORETRACE_RESULTS"] = str(self.out)
        file = part(name, VECTOR)
        if not file.exists():
            with self.timed(f"{name}: control vector"):
                sides, pairs = self._sides(name), self.sizes.pairs
                train_vector(self.lm, self.tokenizer, sides, file, pairs)
        one = build(self.lm, self.tokenizer, attribute=name, coefficient=coefficient)
        return one.active()

    def _sides(self, name: str) -> Sides:
        """Return the texts that an attribute is fitted to, by side."""
        if not name.endswith(WRITTEN):
            return read_sides(AttributePlan(TRAIN, score="positive"), self.data)
        rows = self.write(name)
        return Sides(
            [row["text"] for row in rows if row["score"]],
            [row["text"] for row in rows if not row["score"]],
        )

    def generate(self, name: str, label: str, method: Method) -> list[dict[str, Any]]:
        """Continue the prompts, except those that the file already has."""
        file = self.out / f"{'' if label == 'bare' else f'{name}, '}{label}.jsonl"
        rows = _io.read_lines(file)
        table = read_rows(self.data / PROMPTS, ["prompt", "kind"])
        prompts = [row["prompt"] for row in table if row["kind"] == "neutral"]
        for start in range(len(rows), self.sizes.prompts, self.sizes.batch):
            stop = min(start + self.sizes.batch, self.sizes.prompts)
            _io.append_lines(file, self._continue(name, method, prompts[start:stop], start))
        return _io.read_lines(file)

    def _continue(
        self, name: str, method: Method, prompts: list[str], seed: int
    ) -> list[dict[str, Any]]:
        """Continue a batch of prompts: a row for each."""
        goal: Goals = None
        if method.level is not None:
            attribute = self.attribute(name)
            compiler = Compiler(self.hmm, self.sizes.tokens, memory=0)
            goal = compiler.compile(Goal(attribute, level=method.level))
        copies = self.sizes.copies
        with self.hook(name, method.coefficient):
            start = perf_counter()
            runs = SteeredRuns(
                self.lm,
                self.encode([method.instruction.format(prompt=prompt) for prompt in prompts]),
                ends=self.ends,
                copies=copies,
                max_new_tokens=self.sizes.tokens,
                top_p=TOP_P,
                seed=seed,
            )
            drawn = runs.draw(goal)
            seconds = perf_counter() - start
        texts = [
            decode_after(self.tokenizer, ids, one.tokens)
            for ids, one in zip(runs.prompts, drawn, strict=True)
        ]
        parts = [slice(first, first + copies) for first in range(0, len(texts), copies)]
        nats = token_nll(self.lm, self.encode, prompts, [texts[part] for part in parts])
        losses = [sum(one) / len(one) if one else None for row in nats for one in row]
        return [
            {
                "prompt": prompt,
                "texts": texts[part],
                "losses": losses[part],
                "prices": [one.price / len(one.tokens) for one in drawn[part]],
                "tokens": [len(one.tokens) for one in drawn[part]],
                "seconds": seconds / len(prompts),
            }
            for prompt, part in zip(prompts, parts, strict=True)
        ]

    def judges(self, name: str) -> dict[str, Any]:
        """Return functions from texts to scores, which have not seen the attribute's texts."""
        encoder = os.environ.get("FORETRACE_ENCODER")
        base = name.removesuffix(WRITTEN)
        if base != "positive":
            rows = read_rows(JUDGE_TEXTS / f"{base}.texts.jsonl", ["text", "side"])
            labels = [row["side"] for row in rows]
            judge = LinearJudge.train([row["text"] for row in rows], labels, encoder=encoder)
            return {"judge": judge.scorer("for")}
        rows = read_rows(self.data / REVIEW_TEXTS, ["text", "positive"])
        labels = [str(row["positive"]) for row in rows]
        judge = LinearJudge.train([row["text"] for row in rows], labels, encoder=encoder)
        return {"judge": judge.scorer("1"), "VADER": vader}


def vader(texts: Sequence[str]) -> list[float]:
    """Return the compound scores of VADER, as numbers between 0 and 1."""
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    analyzer = SentimentIntensityAnalyzer()
    return [(analyzer.polarity_scores(text)["compound"] + 1) / 2 for text in texts]


def methods_of(name: str) -> dict[str, Method]:
    """Return the methods that are compared."""
    steered = {"bare": Method(), **{level: Method(level) for level in LEVELS}}
    if name == "positive" + WRITTEN:  # the other methods do not depend on the texts
        return steered
    instruction = description_of(name).prompt + "\n\n{prompt}"
    vectors = {f"control vector, {one:g}": Method(coefficient=one) for one in COEFFICIENTS}
    others = {
        "prompting": Method(instruction=instruction),
        "prompting + strong": Method("strong", instruction),
    }
    return {**steered, **others, **vectors}


def description_of(name: str) -> Description:
    """Return the description of an attribute."""
    return DESCRIPTIONS[name.removesuffix(WRITTEN)]


def compare_writers(report: Report, second: SecondLM) -> None:
    """Fit *positive* for SmolLM2 to its own texts and to the second LM's, and steer it."""
    name = "positive" + WRITTEN
    own = SecondLM(find_smollm2(), second.data, second.out / "own texts", second.sizes)
    other = replace(own, out=second.out / "texts of the second LM")
    for one in (own, other):
        one.out.mkdir(exist_ok=True)
    shutil.copy(second.texts(name), other.texts(name))
    rows = read_rows(second.data / REVIEW_TEXTS, ["text", "positive"])
    for one in (own, other):
        windows = tokenize([row["text"] for row in rows], one.tokenizer)
        truth = [int(rows[text]["positive"]) for text in windows.texts]
        found = one.attribute(name).probability(windows.token_ids)
        report.add(f"{one.out.name}: texts", len(one.write(name)), "")
        report.add(f"{one.out.name}: AUC on reviews", float(roc_auc_score(truth, found)), "")
        measure(report, one, name, f"{one.out.name}: ")


def measure(
    report: Report, second: SecondLM, name: str, prefix: str = "", labels: Sequence[str] = ()
) -> None:
    """Make an attribute, steer toward it, and add the figures of all methods, or of some."""
    attribute = second.attribute(name)
    title = prefix + name
    report.add(f"{title}: AUC, held out", attribute.config.fit["auc"], "")
    for level, strength in attribute.config.levels.items():
        guess = HMMPrices(second.hmm).strength(attribute, BUDGETS[level])
        report.add(f"{title}: strength of {level}", strength, "")
        report.add(f"{title}: strength of {level} by frequencies alone", guess, "")
    judges = second.judges(name)
    methods = methods_of(name)
    for label in labels or methods:
        rows = second.generate(name, label, methods[label])
        texts, counts = [row["texts"] for row in rows], [row["tokens"] for row in rows]
        figures = {
            figure: metrics.mean_score(score_rows(judge, texts)) for figure, judge in judges.items()
        }
        figures["perplexity"] = metrics.perplexity([row["losses"] for row in rows])
        figures["price"] = metrics.price([row["prices"] for row in rows], counts)
        figures["dist-3"] = metrics.distinct(texts, 3)
        figures["letters"] = metrics.letters(texts)
        figures["words"] = metrics.words(texts)
        for figure, measured in figures.items():
            value, *interval = metrics.interval(measured)
            report.add(f"{title}, {label}: {figure}", value, "", interval=interval)
        seconds = sum(row["seconds"] for row in rows)
        report.add(f"{title}, {label}: tokens per second", sum(map(sum, counts)) / seconds, "")


def main() -> None:
    """Measure every attribute."""
    args = options(__doc__)
    report = Report("Attributes for a second LM, without an HMM")
    data = Path(os.environ["FORETRACE_DATA"])
    with tempfile.TemporaryDirectory() as scratch:
        second = SecondLM(find_smollm2(), data, Path(scratch), QUICK)
        if not args.quick:
            source, out = (Path(os.environ[f"FORETRACE_{key}"]) for key in ("LM", "OUT"))
            second = SecondLM(source, data, out, Sizes())
        second.out.mkdir(parents=True, exist_ok=True)
        if args.quick:
            measure(report, second, "positive" + WRITTEN, labels=("bare", "strong"))
        else:
            for name in NAMES:
                measure(report, second, name)
            compare_writers(report, second)
        for name, seconds in _io.read_json(second.out / "seconds.json").items():
            report.add(f"time of {name}", seconds, "s")
    report.publish(args.json)


if __name__ == "__main__":
    main()
