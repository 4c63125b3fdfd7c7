"""Measure what is kept under steering: knowledge, other properties of texts, and terms for people.

SmolLM2 is steered with the HMM and the attributes of `examples/`, in float32. FORETRACE_DATA names
the folder of data, and FORETRACE_RESULTS the folder of answers and control vectors, from which an
interrupted run resumes. Install first:

    pip install vaderSentiment
    pip install --no-deps -r benchmarks/peers/requirements-control-vectors.txt

Answers: 300 multiple-choice questions; the answer is the option with the highest probability, bare,
steered at every level, with a control vector, and after an instruction. Drift: at every token of
bare continuations of ordinary prompts, the entropy of the next token and the probability of words
about politics and people, bare and steered; then the length and sentiment of steered texts. People:
the probability of terms for groups of people in neutral sentences. --quick measures little of each.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, Self

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from torch import Tensor

import foretrace as ft
from drift import TEMPLATES, Texts, fit_with_groups, measure_drift, measure_people
from foretrace.evaluate import Plugin
from foretrace.evaluate.metrics import change, interval, mean_score
from foretrace.evaluate.preparation import goal_checksum
from foretrace.evaluate.suite import load_suite
from foretrace.lookahead.levels import BUDGETS
from foretrace.steering.price import prices
from harness import Report, options
from keyword_texts import add_lines, read_lines
from peers import control_vectors
from peers.parts import inputs_identity, part
from peers.sides import read_sides
from questions import Question, questions
from retrospect import TextScores, score_texts
from small_lm import HORIZON, SmallLM

PEERS = Path(__file__).parent / "peers"
SUITES = {"nontoxic": "detox-hard", "positive": "sentiment", "political": "politics"}
COEFFICIENTS = (0.1, 0.2)
SIDE = 1000  # texts of each side that pairs are drawn from
LEVELS = ("medium", "strong")


@dataclass(frozen=True)
class Size:
    """How much to measure."""

    every: int
    """Of so many questions, one is asked."""
    peers_every: int
    """Of so many asked questions, one is also asked with prompting and control vectors."""
    attributes: tuple[str, ...]
    vectors: tuple[str, ...]
    pairs: int
    """Pairs of texts that a control vector is made from."""
    texts: Texts
    templates: int


FULL = Size(1, 2, tuple(SUITES), ("nontoxic", "positive"), 256, Texts(32, 2, 24), len(TEMPLATES))
QUICK = Size(59, 1, ("nontoxic",), (), 0, Texts(2, 2, 4), 1)


def main() -> None:
    """Measure answers, drift, and terms for groups of people."""
    args = options(__doc__)
    report = Report("What is kept under steering")
    small, size = SmallLM.load(), QUICK if args.quick else FULL
    goals = {f"nontoxic, {level}": small.goal(small.store["nontoxic"], level) for level in LEVELS}
    if not args.quick:
        fitted = fit_with_groups(small)
        goals |= {f"with groups, {level}": small.goal(fitted, level) for level in LEVELS}
    with tempfile.TemporaryDirectory() as scratch:
        results = Path(scratch if args.quick else os.environ["FORETRACE_RESULTS"]) / "kept"
        os.environ["FORETRACE_RESULTS"] = str(results)  # where parts are kept
        measure_answers(small, size, report)
    measure_people(small, goals, size.templates, report)
    measure_drift(small, goals, size.texts, report)
    report.publish(args.json)


class Answers(NamedTuple):
    """Answers to a question, of the LM as it is and toward each goal; or of one to many."""

    right: list[bool]
    """Whether the right option has the highest probability."""
    nats: list[float]
    """The log-probability of the right option."""
    prices: list[float]
    """The KL divergence of the answer's first token from the bare LM's, in nats."""

    @classmethod
    def collect(cls, asked: Sequence["Answers"], row: int = 0) -> Self:
        """Collect one row of the answers to all questions."""
        return cls(*([column[row] for column in columns] for columns in zip(*asked, strict=True)))


def measure_answers(small: SmallLM, size: Size, report: Report) -> None:
    """Measure accuracy and the log-probability of right answers, by every method."""
    asked = questions()[:: size.every]
    goals = {
        f"{name}, {level}": small.goal(small.store[name], level)
        for name in size.attributes
        for level in BUDGETS
    }

    def steered(question: Question) -> Answers:
        scores = score_options(small, question, list(goals.values()))
        return to_answer(scores, scores.first[:1])

    answers = ask("steered", asked, steered, [goal_checksum(goal) for goal in goals.values()])
    bare = Answers.collect(answers)
    add_bare(report, asked, bare)
    for row, name in enumerate(goals, 1):
        add_method(report, name, Answers.collect(answers, row), bare)
    measure_peers(small, size, asked[:: size.peers_every], report)


def measure_peers(small: SmallLM, size: Size, asked: Sequence[Question], report: Report) -> None:
    """Measure the same after an instruction, and with control vectors."""
    scores = {question.prompt: score_options(small, question, []) for question in asked}
    first = {prompt: one.first for prompt, one in scores.items()}  # prices are relative to it
    bare = Answers.collect([to_answer(one, one.first) for one in scores.values()])
    for name in size.attributes:
        suite = load_suite(PEERS / f"{SUITES[name]}.yaml")
        instruction = str(suite.methods["prompting"].instruction)
        answer = partial(answer_after, small, first, template=instruction)
        prompted = ask(f"{name}, prompting", asked, answer, instruction)
        add_method(report, f"{name}, prompting", Answers.collect(prompted), bare)
    for name, plugin in control(small, size):
        with plugin.active():
            controlled = ask(name, asked, partial(answer_after, small, first), plugin.identity)
        add_method(report, name, Answers.collect(controlled), bare)


def ask(
    name: str,
    asked: Sequence[Question],
    answer: Callable[[Question], Answers],
    settings: object,
) -> list[Answers]:
    """Return the answers to questions, from the file of a method or given now."""
    inputs = inputs_identity([question.prompt for question in asked], settings)
    file = Path(os.environ["FORETRACE_RESULTS"]) / f"{name}-{inputs[:16]}.jsonl"
    known = {row.pop("question"): Answers(**row) for row in read_lines(file)}
    for question in asked:
        if question.prompt not in known:
            known[question.prompt] = answer(question)
            add_lines(file, [{"question": question.prompt, **known[question.prompt]._asdict()}])
    return [known[question.prompt] for question in asked]


def answer_after(
    small: SmallLM,
    first: Mapping[str, Tensor],
    question: Question,
    template: str = "{prompt}",
) -> Answers:
    """Answer a question in a template, by the LM as it is now."""
    return to_answer(score_options(small, question, [], template), first[question.prompt])


def score_options(
    small: SmallLM, question: Question, goals: Sequence[ft.CompiledGoal], template: str = "{prompt}"
) -> TextScores:
    """Score the options of a question by the LM as it is, then toward each goal."""
    prompt = small.encode(template.replace("{prompt}", question.prompt))
    texts = [small.tokenizer(option).input_ids for option in question.options]
    return score_texts(small.lm, goals, prompt, texts, ends=small.ends, limit=HORIZON)


def to_answer(scores: TextScores, first: Tensor) -> Answers:
    """Return what an answer is judged by; `first` has the bare LM's first tokens."""
    return Answers(
        [is_right(options) for options in scores.texts],
        scores.texts[:, 0].tolist(),
        [float(prices(first, row[None])) for row in scores.first],
    )


def is_right(options: Tensor) -> bool:
    """Return whether the first option is more probable than all others."""
    return bool((options[0] > options[1:]).all())


def add_bare(report: Report, asked: Sequence[Question], bare: Answers) -> None:
    """Report the accuracy of the bare LM, on all questions and on each kind."""
    for kind in ("all", *dict.fromkeys(question.kind for question in asked)):
        rows = [
            [float(right)]
            for question, right in zip(asked, bare.right, strict=True)
            if kind in ("all", question.kind)
        ]
        value, *bounds = interval(mean_score(rows))
        report.add(f"bare: accuracy, {kind} ({len(rows)})", value, "", interval=bounds)


def add_method(report: Report, name: str, method: Answers, bare: Answers) -> None:
    """Report the accuracy of a method, and its paired differences from the bare LM."""
    right, bare_right = (
        mean_score([[float(is_so)] for is_so in one.right]) for one in (method, bare)
    )
    nats, bare_nats = (mean_score([[value] for value in one.nats]) for one in (method, bare))
    value, *bounds = interval(right)
    report.add(f"{name}: accuracy", value, "", interval=bounds)
    for what, ours, theirs in (("accuracy", right, bare_right), ("log p(right)", nats, bare_nats)):
        value, *bounds = change(ours, theirs).difference
        report.add(f"{name}: {what} minus bare", value, "", interval=bounds)
    lost = sum(was and not now for was, now in zip(bare.right, method.right, strict=True))
    won = sum(now and not was for was, now in zip(bare.right, method.right, strict=True))
    report.add(f"{name}: right answers lost", lost, "questions")
    report.add(f"{name}: right answers won", won, "questions")
    report.add(f"{name}: price at the answer", fmean(method.prices), "nats")


def control(small: SmallLM, size: Size) -> Iterator[tuple[str, Plugin]]:
    """Yield control vectors: a name, and what is active while the LM is controlled."""
    for name in size.vectors:
        plan = load_suite(PEERS / f"{SUITES[name]}.yaml").attributes[name]
        file = part(name, control_vectors.VECTOR)
        sides = read_sides(plan, small.data, SIDE)
        control_vectors.train_vector(small.lm, small.tokenizer, sides, file, size.pairs)
        for coefficient in COEFFICIENTS:
            plugin = control_vectors.build(
                small.lm, small.tokenizer, attribute=name, coefficient=coefficient
            )
            yield f"{name}, control vector {coefficient}", plugin


if __name__ == "__main__":
    main()
