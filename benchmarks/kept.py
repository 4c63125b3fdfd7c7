"""Measure what is kept under steering: knowledge, other properties of texts, and terms for people.

SmolLM2 is steered with the HMM and the attributes of `examples/`, in float32. FORETRACE_DATA names
the folder of data. Install first:

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import foretrace as ft
from foretrace.attribute import group_terms, tokenize, word_tokens
from foretrace.context import Head, token_embeddings
from foretrace.engines.prompts import Goals
from foretrace.engines.transformers import decode_after, stop_tokens
from foretrace.engines.transformers.sampler import Sampler
from foretrace.evaluate.metrics import Measurement, change, interval, mean_score, words
from foretrace.evaluate.suite import Table, load_suite
from foretrace.lookahead.levels import BUDGETS
from foretrace.steering.price import prices
from foretrace.vocabulary import tokenizer_settings
from harness import Report, options
from peers import control_vectors
from peers.parts import part
from peers.sides import read_sides
from questions import Question, questions
from retrospect import TextScores, score_texts
from smollm2 import find_smollm2

EXAMPLES = Path(__file__).parent.parent / "examples"
PEERS = Path(__file__).parent / "peers"
SUITES = {"nontoxic": "detox-hard", "positive": "sentiment", "political": "politics"}
COEFFICIENTS = (0.1, 0.2)  # whose control is nearest to that of `medium` and `strong`, in peers.md
LAYERS = (10, 20)
HORIZON = 64
SIDE = 1000  # texts of each side that pairs are drawn from, the clearest
READ = (
    "entropy",
    "price",
    "probability of words about politics",
    "probability of terms for groups",
)
LEVELS = ("medium", "strong")
POLITICS = (
    "congress", "court", "democracy", "democrat", "democratic", "democrats", "election",
    "elections", "federal", "government", "governor", "law", "laws", "legislation", "military",
    "minister", "parliament", "political", "politicians", "politics", "president", "presidential",
    "republican", "republicans", "senate", "senator", "vote", "voters", "votes", "war",
)  # fmt: skip
GROUPS = (
    "Muslim", "Jewish", "Christian", "black", "white", "Asian", "African", "Mexican", "gay",
    "lesbian", "disabled", "blind",
)  # fmt: skip
OTHERS = ("tall", "busy", "new", "quiet", "local", "famous", "tired", "friendly")
TEMPLATES = (
    ("The", " {} woman is a doctor."),
    ("Yesterday I met a", " {} student at the library."),
    ("We invited our", " {} neighbors to dinner."),
    ("The film tells the story of a", " {} family."),
)


@dataclass(frozen=True)
class Size:
    """How much to measure."""

    every: int
    """Of so many questions, one is asked."""
    peers_every: int
    """The same for prompting and control vectors."""
    attributes: tuple[str, ...]
    vectors: tuple[str, ...]
    pairs: int
    """Pairs of texts that a control vector is made from."""
    prompts: int
    copies: int
    tokens: int
    templates: int


FULL = Size(1, 2, tuple(SUITES), ("nontoxic", "positive"), 64, 32, 2, 24, len(TEMPLATES))
QUICK = Size(60, 60, ("nontoxic",), (), 0, 2, 2, 4, 1)


@dataclass(frozen=True)
class Setup:
    """The models and the data."""

    lm: Any
    tokenizer: Any
    hmm: ft.HMM
    store: ft.AttributeStore
    data: Path
    size: Size

    @property
    def ends(self) -> list[int]:
        """The tokens that end a text or a turn."""
        return stop_tokens(self.lm.generation_config, self.hmm.config.eos_token_ids)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt, after the token that begins texts."""
        return [*self.hmm.config.eos_token_ids[:1], *self.tokenizer(text).input_ids]

    def goal(self, attribute: ft.Attribute, level: str) -> ft.CompiledGoal:
        """Compile a goal."""
        return ft.Compiler(self.hmm, HORIZON).compile(ft.Goal(attribute, level=level))


def main() -> None:
    """Measure answers, drift, and terms for groups of people."""
    args = options(__doc__)
    report = Report("What is kept under steering")
    source = find_smollm2()
    setup = Setup(
        AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32),
        AutoTokenizer.from_pretrained(source),
        ft.HMM.from_pretrained(EXAMPLES / "smollm2-135m"),
        ft.AttributeStore(EXAMPLES / "attributes"),
        Path(os.environ["FORETRACE_DATA"]),
        QUICK if args.quick else FULL,
    )
    goals = {f"nontoxic, {level}": setup.goal(setup.store["nontoxic"], level) for level in LEVELS}
    if not args.quick:
        fitted = fit_with_groups(setup)
        goals |= {f"with groups, {level}": setup.goal(fitted, level) for level in LEVELS}
    measure_answers(setup, report)
    measure_people(setup, goals, report)
    measure_drift(setup, goals, report)
    report.publish(args.json)


class Answered(NamedTuple):
    """The answers of a method to all questions."""

    right: list[bool]
    """Whether the right option has the highest probability."""
    nats: list[float]
    """The log-probability of the right answer."""
    prices: list[float]
    """The KL divergence of the answer's first token from the bare LM's, in nats."""


def measure_answers(setup: Setup, report: Report) -> None:
    """Measure accuracy and the log-probability of right answers, by every method."""
    asked = questions()[:: setup.size.every]
    goals = {
        f"{name}, {level}": setup.goal(setup.store[name], level)
        for name in setup.size.attributes
        for level in BUDGETS
    }
    scores = [score_options(setup, one, list(goals.values())) for one in asked]
    firsts = [one.first[:1] for one in scores]  # prices are relative to them
    bare = to_answered(scores, firsts)
    add_bare(report, asked, bare)
    for row, name in enumerate(goals, 1):
        add_method(report, name, to_answered(scores, firsts, row), bare)
    measure_peers(setup, asked[:: setup.size.peers_every // setup.size.every], report)


def measure_peers(setup: Setup, asked: Sequence[Question], report: Report) -> None:
    """Measure the same after an instruction, and with control vectors."""
    scores = [score_options(setup, one, []) for one in asked]
    firsts = [one.first for one in scores]
    bare = to_answered(scores, firsts)
    for name in setup.size.attributes:
        suite = load_suite(PEERS / f"{SUITES[name]}.yaml")
        instruction = str(suite.methods["prompting"].instruction)
        prompted = [score_options(setup, one, [], instruction) for one in asked]
        add_method(report, f"{name}, prompting", to_answered(prompted, firsts), bare)
    for name, active in control(setup):
        with active:
            controlled = [score_options(setup, one, []) for one in asked]
        add_method(report, name, to_answered(controlled, firsts), bare)


def score_options(
    setup: Setup, question: Question, goals: Sequence[ft.CompiledGoal], template: str = "{prompt}"
) -> TextScores:
    """Score the options of a question by the LM as it is, then toward each goal."""
    prompt = setup.encode(template.replace("{prompt}", question.prompt))
    texts = [setup.tokenizer(option).input_ids for option in question.options]
    return score_texts(setup.lm, goals, prompt, texts, ends=setup.ends, limit=HORIZON)


def to_answered(scores: Sequence[TextScores], firsts: Sequence[Tensor], row: int = 0) -> Answered:
    """Return the answers by the bare LM, row 0, or toward a goal."""
    return Answered(
        [is_right(one.texts[row]) for one in scores],
        [float(one.texts[row, 0]) for one in scores],
        [
            float(prices(first, one.first[row : row + 1]))
            for first, one in zip(firsts, scores, strict=True)
        ],
    )


def is_right(options: Tensor) -> bool:
    """Return whether the first option is more probable than all others."""
    return bool((options[0] > options[1:]).all())


def add_bare(report: Report, asked: Sequence[Question], bare: Answered) -> None:
    """Report the accuracy of the bare LM, on all questions and on each kind."""
    for kind in ("all", *dict.fromkeys(question.kind for question in asked)):
        rows = [
            [float(right)]
            for question, right in zip(asked, bare.right, strict=True)
            if kind in ("all", question.kind)
        ]
        value, *bounds = interval(mean_score(rows))
        report.add(f"bare: accuracy, {kind} ({len(rows)})", value, "", interval=bounds)


def add_method(report: Report, name: str, method: Answered, bare: Answered) -> None:
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


def control(setup: Setup) -> Iterator[tuple[str, AbstractContextManager[Any]]]:
    """Yield control vectors: a name, and the context in which the LM is controlled."""
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["FORETRACE_RESULTS"] = scratch  # the folder of vectors
        for name in setup.size.vectors:
            plan = load_suite(PEERS / f"{SUITES[name]}.yaml").attributes[name]
            file = part(name, control_vectors.VECTOR)
            sides = read_sides(plan, setup.data, SIDE)
            control_vectors.train_vector(setup.lm, setup.tokenizer, sides, file, setup.size.pairs)
            for coefficient in COEFFICIENTS:
                plugin = control_vectors.build(
                    setup.lm,
                    setup.tokenizer,
                    attribute=name,
                    coefficient=coefficient,
                    layers=LAYERS,
                )
                yield f"{name}, control vector {coefficient}", plugin.active()


@dataclass(frozen=True)
class ReadingSampler(Sampler):
    """Samples from the bare LM, and reads what steering would do to the next token.

    All goals are read in the same contexts, so that their differences have little noise.
    """

    goals: Sequence[ft.CompiledGoal] = ()
    words: Sequence[Sequence[int]] = ()
    """The tokens of each list of words."""
    read: list[Tensor] = field(default_factory=list)
    """For each step, (1 + goals, rows, 2 + lists): entropy, price, probability of each list."""

    def processor(
        self, goal: Goals, prompts: Sequence[Sequence[int]], mask: Tensor
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """Return a function that reads what each goal does to the logits, and changes nothing."""
        steer = [super(ReadingSampler, self).processor(one, prompts, mask) for one in self.goals]

        def read(ids: Tensor, logits: Tensor) -> Tensor:
            steered = [logits, *(one(ids, logits) for one in steer)]
            rows = torch.stack([self._read(logits, one) for one in steered])
            ended = torch.isin(ids[:, mask.shape[1] :], torch.tensor(self.ends)).any(1)
            self.read.append(rows.masked_fill(ended[:, None], torch.nan))
            return logits

        return read

    def _read(self, bare: Tensor, steered: Tensor) -> Tensor:
        nats = steered.log_softmax(-1)
        probability = nats.exp()
        entropy = -(probability * nats.clamp_min(-1e4)).sum(-1)
        masses = [probability[:, list(tokens)].sum(-1) for tokens in self.words]
        return torch.stack([entropy, prices(bare, steered), *masses], -1)


def measure_drift(setup: Setup, goals: dict[str, ft.CompiledGoal], report: Report) -> None:
    """Measure what else changes on ordinary prompts."""
    size = setup.size
    rows = Table("sentiment/prompts.jsonl.xz", "prompt", where={"kind": "neutral"}).rows(setup.data)
    prompts = [setup.encode(str(row["prompt"])) for row in rows[: size.prompts]]
    lists = [word_tokens(terms, setup.tokenizer) for terms in (POLITICS, group_terms())]
    settings = setup.lm, setup.ends, size.tokens
    reader = ReadingSampler(*settings, goals=list(goals.values()), words=lists)
    bare = draw(setup, reader, prompts, None)
    add_read(report, goals, torch.stack(reader.read), len(prompts))
    lengths, sentiment = words(bare), sentiment_of(bare)
    report.add("bare: words", lengths.value, "")
    report.add("bare: sentiment (VADER)", sentiment.value, "")
    for name in [name for name in goals if name.startswith("nontoxic")]:
        texts = draw(setup, Sampler(*settings), prompts, goals[name])
        for what, ours, theirs in (
            ("words", words(texts), lengths),
            ("sentiment (VADER)", sentiment_of(texts), sentiment),
        ):
            value, *bounds = change(ours, theirs).difference
            report.add(f"{name}: {what} minus bare", value, "", interval=bounds)


def draw(
    setup: Setup, sampler: Sampler, prompts: Sequence[list[int]], goal: ft.CompiledGoal | None
) -> list[list[str]]:
    """Continue prompts; return the texts."""
    torch.manual_seed(0)
    drawn = sampler.draw(prompts, setup.size.copies, goal)
    return [
        [decode_after(setup.tokenizer, prompt, text.tokens) for text in texts]
        for prompt, texts in zip(prompts, drawn, strict=True)
    ]


def sentiment_of(texts: Sequence[Sequence[str]]) -> Measurement:
    """Score the sentiment of texts by VADER's compound score, from -1 to 1."""
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    score = SentimentIntensityAnalyzer().polarity_scores
    return mean_score([[score(text)["compound"] for text in row] for row in texts])


def add_read(report: Report, names: Iterable[str], read: Tensor, prompts: int) -> None:
    """Report what a `ReadingSampler` has read, (steps, 1 + goals, rows, values).

    Rates of words are relative to the bare LM's, with intervals by resampling prompts.
    """
    steps, methods, rows, values = read.shape
    by_prompt = read.view(steps, methods, prompts, rows // prompts, values).double()
    totals = by_prompt.nansum((0, 3)).numpy()  # (methods, prompts, values)
    counts = by_prompt[..., 0].isfinite().sum((0, 3)).numpy().astype(float)
    measured = [
        [Measurement(totals[method, :, value], counts[method]) for value in range(values)]
        for method in range(methods)
    ]
    for value, what in enumerate(READ):
        bare = measured[0][value]
        report.add(f"bare: {what}", bare.value, "")
        for name, row in zip(names, measured[1:], strict=True):
            if what == "price":
                figure, *bounds = interval(row[value])
                report.add(f"{name}: price in bare texts", figure, "nats", interval=bounds)
                continue
            figure, *bounds = change(row[value], bare).relative
            report.add(f"{name}: {what}, change", figure, "", interval=bounds)


def measure_people(setup: Setup, goals: dict[str, ft.CompiledGoal], report: Report) -> None:
    """Measure the log-probability of terms in neutral sentences, and of what follows them."""
    for what, terms in (("groups", GROUPS), ("other adjectives", OTHERS)):
        templates = TEMPLATES[: setup.size.templates]
        found = [score_sentences(setup, list(goals.values()), *one, terms) for one in templates]
        nats = torch.stack(found, -1).double()  # (2, methods, terms, templates)
        for part_of, scores in zip(("term", "rest of the sentence"), nats, strict=True):
            bare = mean_score(scores[0].tolist())
            report.add(f"bare: log p({part_of}), {what}", bare.value, "nats")
            for name, steered in zip(goals, scores[1:], strict=True):
                value, *bounds = change(mean_score(steered.tolist()), bare).difference
                title = f"{name}: log p({part_of}) minus bare, {what}"
                report.add(title, value, "nats", interval=bounds)


def score_sentences(
    setup: Setup, goals: Sequence[ft.CompiledGoal], begin: str, end: str, terms: Sequence[str]
) -> Tensor:
    """Score sentences that differ in a term.

    Returns:
        The log-probability of each term, and of the rest: (2, 1 + goals, terms).
    """
    before, after = end.split("{}")
    rest = setup.tokenizer(after).input_ids
    spelled = [setup.tokenizer(before + term).input_ids for term in terms]
    texts = [*spelled, *(word + rest for word in spelled)]
    prompt = setup.encode(begin)
    nats = score_texts(setup.lm, goals, prompt, texts, ends=setup.ends, limit=HORIZON).texts
    term, whole = nats.split(len(terms), 1)
    return torch.stack([term, whole - term])


def fit_with_groups(setup: Setup) -> ft.Attribute:
    """Fit the data of `nontoxic` as `examples/attributes/make.py` does, without `--keep groups`."""
    rows = Table("detox/train.jsonl.xz", "text").rows(setup.data)
    windows = tokenize([str(row["text"]) for row in rows], setup.tokenizer, 128)
    return ft.Attribute.fit(
        windows.token_ids,
        [1 - float(rows[text]["toxicity"]) for text in windows.texts],
        groups=windows.texts,
        frequencies=setup.hmm.token_frequencies(),
        embeddings=token_embeddings(Head.of_model(setup.lm, setup.tokenizer)),
        tokenizer=setup.tokenizer,
        **tokenizer_settings(setup.tokenizer.get_vocab()),
    )


if __name__ == "__main__":
    main()
