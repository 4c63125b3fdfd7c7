"""Measure texts that must have one, three or five words: where looking ahead should win.

Concepts are sets of everyday words, in keywords.json. Each is required after neutral openings, in
40 tokens, or 64 for five words. The LM is SmolLM2-135M in float32, at top-p 0.9.

FORETRACE_RESULTS names the folder of texts, from which an interrupted run resumes. A complete run
keeps its texts in docs/results/generations/keywords.jsonl.xz. A run in an empty folder begins with
them and writes what they lack; delete the file to write all texts again. FORETRACE_TEXTS is the
number of pairs of a concept and an opening, of each size, and of texts for each; 100x5 by default.
With FORETRACE_DATA and FORETRACE_ENCODER, a judge says how positive texts are. FORETRACE_SECOND_LM
names the folder or the GGUF file of another LM, under which some of the texts are scored too.
--quick writes two texts for one pair, and leaves out the judge and the second LM.
"""

import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from math import exp, isnan
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import foretrace as ft
from foretrace.engines.prompts import decode_after
from foretrace.evaluate.metrics import Interval, Measurement, change, distinct, interval, mean_score
from foretrace.evaluate.perplexity import token_nll
from foretrace.evaluate.scoring import train_judge
from foretrace.evaluate.suite import load_suite
from foretrace.gguf import is_gguf, load_llama
from harness import Report, options
from keyword_methods import (
    BOTH,
    BOTH_POSITIVE,
    EXAMPLES,
    LOOKAHEAD,
    METHODS,
    PROMPTING,
    Batch,
    Pair,
    Writer,
    available_methods,
)
from keyword_texts import (
    CONCEPTS,
    KEPT,
    TextFile,
    Written,
    add_lines,
    keep_texts,
    missing_words,
    places,
    read_lines,
    restore_texts,
)
from smollm2 import find_smollm2

LENGTHS = {1: 40, 3: 40, 5: 64}  # tokens, by the number of words
BATCH_PAIRS = 10  # tables of five words take 120 MB for each pair
SECOND_TEXTS = 34  # texts of each size and method under the second LM
COMPLETE = "texts with all words"
FIRST = 20  # tokens

Texts = dict[str, list[list[Written]]]
"""The texts of each method, by pair."""
Figure = Callable[[Sequence[Written], Pair], Sequence[float | None]]


class Sizes(NamedTuple):
    """How much to write."""

    words: Sequence[int]
    pairs: int
    copies: int
    length: int | None
    """The largest number of tokens, if it is not that of `LENGTHS`."""


def main() -> None:
    """Write the texts that are missing, and report all figures."""
    args = options(__doc__)
    report = Report("required words in texts of SmolLM2-135M, top-p 0.9")
    pairs, copies = map(int, os.environ.get("FORETRACE_TEXTS", "100x5").split("x"))
    sizes = Sizes((3,), 1, 2, 12) if args.quick else Sizes((1, 3, 5), pairs, copies, None)
    with tempfile.TemporaryDirectory() as scratch:
        results = scratch if args.quick else os.environ["FORETRACE_RESULTS"]
        folder = Path(results) / "keywords"
        if not args.quick:
            restore_texts(KEPT, folder)
        write_texts(folder, sizes)
        if not args.quick:
            keep_texts(folder, KEPT)
        judge = None if args.quick else positive_judge()
        second = None if args.quick else os.environ.get("FORETRACE_SECOND_LM")
        for size in sizes.words:
            chosen = read_pairs(size, sizes.pairs)
            texts = read_texts(folder, size, sizes.pairs)
            report_words(report, size, chosen, texts)
            if judge is not None:
                report_positive(report, size, chosen, texts, judge)
            if second:
                report_second(report, size, chosen, texts, folder, second)
    report.publish(args.json)


def read_pairs(size: int, count: int) -> list[Pair]:
    """Return concepts of a size with openings: first each concept once, then with the next one."""
    data = json.loads(CONCEPTS.read_text(encoding="utf-8"))
    concepts, openings = data["concepts"][str(size)], data["openings"]
    return [
        Pair(
            tuple(concepts[number % len(concepts)]),
            openings[(number * 7 + number // len(concepts)) % len(openings)],
        )
        for number in range(count)
    ]


def write_texts(folder: Path, sizes: Sizes) -> None:
    """Write the texts that are not there, all methods together, and score them."""
    source = find_smollm2()
    writer = Writer(
        AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval(),
        AutoTokenizer.from_pretrained(source),
        ft.HMM.from_pretrained(EXAMPLES / "smollm2-135m"),
    )
    files = {name: TextFile(folder / f"{name}.jsonl") for name in available_methods()}
    written = {(name, text.size, text.pair) for name, file in files.items() for text in file.read()}
    for first in range(0, sizes.pairs, BATCH_PAIRS):
        for size in sizes.words:
            pairs = tuple(read_pairs(size, sizes.pairs)[first : first + BATCH_PAIRS])
            length = sizes.length or LENGTHS[size]
            batch = Batch(pairs, sizes.copies, length, seed=1000 * size + first)
            for name, file in files.items():
                if (name, size, first) not in written:
                    print(f"{size} words, pairs from {first}: {name}", file=sys.stderr, flush=True)
                    file.add(score_texts(writer, batch, METHODS[name](writer, batch), size, first))


def score_texts(
    writer: Writer, batch: Batch, rows: Sequence[Sequence[int]], size: int, first: int
) -> Iterator[Written]:
    """Yield texts with the loss of their tokens under the bare LM, after the opening alone."""
    openings = writer.openings(batch)
    kept = [[token for token in row if token not in writer.ends] for row in rows]
    by_pair: Any = [kept[i : i + batch.copies] for i in range(0, len(kept), batch.copies)]
    encode: Any = list  # they are token ids already
    losses = token_nll(writer.lm, encode, openings, by_pair)  # type: ignore[arg-type]
    for pair, (opening, texts) in enumerate(zip(openings, by_pair, strict=True), first):
        for tokens, nats in zip(texts, losses[pair - first], strict=True):
            text = decode_after(writer.tokenizer, opening, tokens)
            yield Written(size, pair, text, [round(one, 4) for one in nats])


def read_texts(folder: Path, size: int, count: int) -> Texts:
    """Return the texts of all methods, by pair."""
    texts: Texts = {}
    for name in available_methods():
        by_pair: dict[int, list[Written]] = defaultdict(list)
        for text in TextFile(folder / f"{name}.jsonl").read():
            if text.size == size:
                by_pair[text.pair].append(text)
        texts[name] = [by_pair[number] for number in range(count)]
    return texts


def covered(texts: Sequence[Written], pair: Pair) -> list[float]:
    """Return for each text whether it has all words."""
    return [float(not missing_words(one.text, pair.words)) for one in texts]


def place_of(name: str, texts: Sequence[Written], pair: Pair) -> list[float | None]:
    """Return one of the places of the words in each text; None where a word is missing."""
    found = [places(one.text, pair.words) for one in texts]
    return [None if one is None else float(getattr(one, name)) for one in found]


def ends_with_word(texts: Sequence[Written], pair: Pair) -> list[float | None]:
    """Return for each text whether nothing comes after the last required word."""
    after = place_of("after", texts, pair)
    return [None if count is None else float(count == 0) for count in after]


FIGURES: Mapping[str, tuple[Figure, float, str]] = {
    COMPLETE: (covered, 100, "%"),
    "first word after": (partial(place_of, "first"), 1, "words"),
    "last word after": (partial(place_of, "last"), 1, "words"),
    "text ends with a required word": (ends_with_word, 100, "%"),
}


def report_words(report: Report, size: int, pairs: Sequence[Pair], texts: Texts) -> None:
    """Report coverage, places, perplexity and repetition of every method."""
    for name, rows in texts.items():
        for figure, (measure, scale, unit) in FIGURES.items():
            found = mean_score([list(measure(*one)) for one in zip(rows, pairs, strict=True)])
            goal = 100 if "lookahead" in name and figure == COMPLETE else None
            value = interval(by_concept(found, pairs))
            add(report, f"{size}: {name}: {figure}", value, unit, scale, goal)
        repetition = distinct([[one.text for one in row] for row in rows], 3)
        add(report, f"{size}: {name}: dist-3", interval(by_concept(repetition, pairs)), "")
        tokens = mean_score([[float(len(one.nats)) for one in row] for row in rows])
        add(report, f"{size}: {name}: tokens", interval(by_concept(tokens, pairs)), "")
    report_perplexities(report, f"{size}: ", pairs, texts)


def report_perplexities(report: Report, prefix: str, pairs: Sequence[Pair], texts: Texts) -> None:
    """Report perplexities, of all texts and of those with all words, and compare the latter.

    Lookahead is compared with a method on the pairs for which that method has texts with all words.
    Later tokens of a text are more probable, and answers to a prompt are short: their first tokens
    are therefore compared, too. Prompting with lookahead is compared with all texts of prompting.
    """
    complete = {
        name: [
            [one for one in row if not missing_words(one.text, pair.words)]
            for row, pair in zip(rows, pairs, strict=True)
        ]
        for name, rows in texts.items()
    }
    for name in texts:
        for label, rows in ((name, texts[name]), (f"{name}, {COMPLETE}", complete[name])):
            means = by_concept(mean_score([[one] for one in mean_losses(rows)]), pairs)
            value = Interval(*(exp(bound) for bound in interval(means)))
            add(report, f"{prefix}{label}: perplexity", value, "")
    for name in texts:
        for most, label in ((None, COMPLETE), (FIRST, f"{COMPLETE}, first {FIRST} tokens")):
            if name == LOOKAHEAD or (most and not name.startswith(PROMPTING)):
                continue
            ours, theirs = (mean_losses(complete[one], most) for one in (LOOKAHEAD, name))
            percent = compare_losses(ours, theirs, pairs)
            if isnan(percent.value):  # no text has all words
                continue
            goal = 15.0 if name == PROMPTING and most is None else None
            label = f"{prefix}{LOOKAHEAD} against {name}, {label}: perplexity"
            report.add(label, percent.value, "%", interval=percent[1:], at_most=goal)
    percent = compare_losses(mean_losses(texts[BOTH]), mean_losses(texts[PROMPTING]), pairs)
    label = f"{prefix}{BOTH} against {PROMPTING}, all texts: perplexity"
    report.add(label, percent.value, "%", interval=percent[1:], at_most=15.0)


def compare_losses(
    ours: Sequence[float | None], theirs: Sequence[float | None], pairs: Sequence[Pair]
) -> Interval:
    """Return the change of the perplexity, in percent, on the pairs for which both are known."""
    known = [None not in both for both in zip(ours, theirs, strict=True)]
    measured = [
        mean_score([[loss] if is_known else [] for loss, is_known in zip(one, known, strict=True)])
        for one in (ours, theirs)
    ]
    first, second = (by_concept(one, pairs) for one in measured)
    return Interval(*(100 * (exp(bound) - 1) for bound in change(first, second).difference))


def add(
    report: Report,
    name: str,
    value: Interval,
    unit: str,
    scale: float = 1.0,
    at_least: float | None = None,
) -> None:
    """Report a value with its interval."""
    bounds = [scale * value.low, scale * value.high]
    report.add(name, scale * value.value, unit, interval=bounds, at_least=at_least)


def mean_losses(rows: Sequence[Sequence[Written]], most: int | None = None) -> list[float | None]:
    """Compute the mean loss of the tokens of each pair, or of the first; None without tokens."""
    means: list[float | None] = []
    for row in rows:
        losses = [loss for one in row for loss in one.nats[:most]]
        means.append(sum(losses) / len(losses) if losses else None)
    return means


def by_concept(measured: Measurement, pairs: Sequence[Pair]) -> Measurement:
    """Sum over the pairs of each concept, because they share what makes texts differ most."""
    numbers = {words: number for number, words in enumerate({pair.words: 0 for pair in pairs})}
    index = [numbers[pair.words] for pair in pairs]
    totals, counts = (
        np.bincount(index, weights=values).astype(float)
        for values in (measured.totals, measured.counts)
    )
    return Measurement(totals, counts, measured.dropped)


def positive_judge() -> Callable[[Sequence[str]], list[float]] | None:
    """Train the judge of the suite `sentiment`; None without data."""
    if not (data := os.environ.get("FORETRACE_DATA")):
        return None
    plan = load_suite("sentiment").judges["positive"]
    assert plan.train is not None
    assert plan.label is not None
    encoder = os.environ.get("FORETRACE_ENCODER")
    judge = train_judge(plan.train.rows(Path(data)), plan.train, plan.label, encoder)
    positive = judge.config.classes.index("1")

    def score(texts: Sequence[str]) -> list[float]:
        return [float(one) for one in judge.probabilities(texts)[:, positive]]

    return score


def report_positive(
    report: Report,
    size: int,
    pairs: Sequence[Pair],
    texts: Texts,
    judge: Callable[[Sequence[str]], list[float]],
) -> None:
    """Report how positive texts are with their openings."""
    scores = {}
    for name, rows in texts.items():
        whole = [
            pair.opening + one.text for pair, row in zip(pairs, rows, strict=True) for one in row
        ]
        found = iter(judge(whole))
        scores[name] = by_concept(mean_score([[next(found) for _ in row] for row in rows]), pairs)
        add(report, f"{size}: {name}: judge's mean", interval(scores[name]), "")
    ours = f"{LOOKAHEAD}, positive"
    for other in (LOOKAHEAD, f"{PROMPTING}, positive", BOTH_POSITIVE):
        difference = change(scores[ours], scores[other]).difference
        add(report, f"{size}: {ours} against {other}: judge's mean", difference, "")


def report_second(
    report: Report, size: int, pairs: Sequence[Pair], texts: Texts, folder: Path, source: str
) -> None:
    """Report perplexities of the first text of some pairs under the second LM."""
    scored = {}
    for name, rows in texts.items():
        chosen = [row[:1] for row in rows[:SECOND_TEXTS]]
        file = folder / "second" / f"{name}.jsonl"
        scored[name] = score_second(file, size, pairs, chosen, source)
    report_perplexities(report, f"{size}, second LM: ", pairs[:SECOND_TEXTS], scored)


def score_second(
    file: Path, size: int, pairs: Sequence[Pair], rows: Sequence[Sequence[Written]], source: str
) -> list[list[Written]]:
    """Return texts with their losses under the second LM, from the file or measured now."""
    known = {(row["size"], row["pair"]): row for row in read_lines(file)}
    scored = []
    for row in rows:
        for text in row:
            found = known.get((text.size, text.pair))
            if found is None or found["text"] != text.text:
                nats = second_losses(source, pairs[text.pair].opening, text.text)
                found = text._replace(nats=nats)._asdict()
                add_lines(file, [found])
            scored.append([Written(**found)])
    return scored


def second_losses(source: str, opening: str, text: str) -> list[float]:
    """Return the loss of each token of a text after its opening under the second LM."""
    model = load_second(source)
    if not is_gguf(source):
        tokenizer = AutoTokenizer.from_pretrained(source)
        encode: Any = partial(encode_all, tokenizer)
        return token_nll(model, encode, [opening], [[text]])[0][0]
    tokens = model.tokenize((opening + text).encode(), add_bos=False)
    before = len(model.tokenize(opening.encode(), add_bos=False))
    model.reset()
    model.eval(tokens)
    logits = torch.from_numpy(np.array(model.scores[before - 1 : len(tokens) - 1]))
    targets = torch.tensor(tokens[before:])
    nats = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    return [round(one, 4) for one in nats.tolist()]


def encode_all(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of texts."""
    return [tokenizer(text).input_ids for text in texts]


@lru_cache(maxsize=1)
def load_second(source: str) -> Any:
    """Load the second LM."""
    if is_gguf(source):
        return load_llama(source, n_ctx=256, logits_all=True)
    return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()


if __name__ == "__main__":
    main()
