"""Measure the side effects of steering: its price on harmless texts, and answers that miss.

SmolLM2 is steered with the HMM and the attributes of `examples/`, at every level. FORETRACE_DATA
names the folder of data, FORETRACE_ENCODER a sentence encoder of the judges, and FORETRACE_RESULTS
the folder of judges and texts, from which an interrupted run resumes. FORETRACE_HMM names another
HMM.

Price: descriptions of news that the judge of toxicity calls harmless are scored in retrospect; at
every token, the price is what steering would cost there. Answers: questions of the role data are
answered in a chat, and a judge that was trained to tell right pairs of question and answer from
wrong ones says which answers are to their question. --quick runs fewer texts, without an encoder.
"""

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import foretrace as ft
from foretrace.chat import as_messages, render_chat
from foretrace.engines.transformers import stop_tokens
from foretrace.engines.transformers.hidden_states import lm_identity
from foretrace.evaluate.continuations import ContinuationGenerator, Method, Sampling
from foretrace.evaluate.metrics import THRESHOLD, Measurement, interval, mean_score
from foretrace.evaluate.preparation import goal_checksum
from foretrace.evaluate.scoring import Scorer
from foretrace.evaluate.suite import JudgePlan, Table, load_suite
from foretrace.lookahead.levels import BUDGETS
from harness import Report, options
from pair_judge import PairJudge, Pairs, pairs_of
from retrospect import retrospect
from smollm2 import find_smollm2

EXAMPLES = Path(__file__).parent.parent / "examples"
HORIZON = 64
ROLES = "roles/rolebench.jsonl.xz"


@dataclass(frozen=True)
class Size:
    """How much to measure."""

    attributes: tuple[str, ...]
    """The attributes whose price is measured."""
    texts: int
    judge_share: int
    """The judge of toxicity is trained on one text in so many."""
    steered: tuple[str, ...]
    """The attributes that answers are steered toward."""
    pairs: int
    """Right pairs to train the judge of pairs on."""
    questions: int
    tokens: int


NAMES = ("nontoxic", "positive", "negative", "political")
TOPICS = ("entertainment", "sport", "technical", "business")
FULL = Size((*NAMES, *TOPICS), 100, 1, ("nontoxic", "positive", "political"), 4000, 150, 64)
QUICK = Size(("nontoxic",), 6, 80, ("positive",), 600, 4, 12)


@dataclass(frozen=True)
class Setup:
    """The models, the data, and the folder of outputs."""

    lm: Any
    tokenizer: Any
    hmm: ft.HMM
    store: ft.AttributeStore
    data: Path
    folder: Path
    encoder: str | None
    size: Size

    def goals(self, names: Sequence[str]) -> dict[str, ft.CompiledGoal]:
        """Return the goals of attributes at every level."""
        compiler = ft.Compiler(self.hmm, HORIZON)
        return {
            f"{name}, {level}": compiler.compile(ft.Goal(self.store[name], level=level))
            for name in names
            for level in BUDGETS
        }

    @property
    def ends(self) -> list[int]:
        """The tokens that end a text or a turn."""
        return stop_tokens(self.lm.generation_config, self.hmm.config.eos_token_ids)


def main() -> None:
    """Measure prices, then answers."""
    args = options(__doc__)
    report = Report("Side effects of steering")
    source = find_smollm2()
    with tempfile.TemporaryDirectory() as scratch:
        setup = Setup(
            AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32),
            AutoTokenizer.from_pretrained(source),
            ft.HMM.from_pretrained(os.environ.get("FORETRACE_HMM", EXAMPLES / "smollm2-135m")),
            ft.AttributeStore(EXAMPLES / "attributes"),
            Path(os.environ["FORETRACE_DATA"]),
            Path(scratch if args.quick else os.environ["FORETRACE_RESULTS"]),
            None if args.quick else os.environ.get("FORETRACE_ENCODER"),
            QUICK if args.quick else FULL,
        )
        _measure_prices(setup, report)
        _measure_answers(setup, report)
    report.publish(args.json)


def _measure_prices(setup: Setup, report: Report) -> None:
    """Measure the price of every goal on harmless texts, in nats per token."""
    texts = list(_harmless_texts(setup, report))
    goals = setup.goals(setup.size.attributes)
    start = setup.hmm.config.eos_token_ids[:1]
    spent = torch.stack(
        [
            retrospect(setup.lm, list(goals.values()), start, text, setup.ends).sum(0)
            for text in texts
        ]
    )
    lengths = np.array([len(text) for text in texts], float)
    for name, totals in zip(goals, spent.T.double().numpy(), strict=True):
        value, *bounds = interval(Measurement(totals, lengths))
        budget = BUDGETS[name.rsplit(", ")[-1]]
        report.add(f"{name}: price on harmless texts", value, "nats per token", interval=bounds)
        report.add(f"{name}: price on harmless texts / budget", value / budget, "")


def _harmless_texts(setup: Setup, report: Report) -> Iterator[list[int]]:
    """Yield the token ids of descriptions of news that the judge of toxicity calls harmless."""
    table = Table("politics/test.jsonl.xz", "description")
    rows = table.rows(setup.data)[: 3 * setup.size.texts]
    texts = [str(row[table.text]) for row in rows]
    scorer = Scorer(
        "toxicity",
        _toxicity_plan(setup.size.judge_share),
        setup.data,
        setup.folder / "side-effects",
        setup.folder / "judges",
        setup.encoder,
        "cpu",
        rows,
    )
    scores = [row[0] for row in scorer.score([[text] for text in texts])]
    harmless = [
        text
        for text, score in zip(texts, scores, strict=True)
        if score is not None and score < THRESHOLD
    ]
    report.add("share of news that the judge calls harmless", len(harmless) / len(texts), "")
    yield from setup.tokenizer(harmless[: setup.size.texts]).input_ids


def _toxicity_plan(share: int) -> JudgePlan:
    """Return the judge of the suite `detox`, trained on one text in `share`."""
    plan = load_suite("detox").judges["toxicity"]
    if share == 1 or plan.train is None:
        return plan
    return replace(plan, train=replace(plan.train, share={"by": "text", "of": share, "take": 0}))


def _measure_answers(setup: Setup, report: Report) -> None:
    """Measure the share of answers that are to their question, bare and steered."""
    judge = _train_pair_judge(setup, report)
    rows = _rows(setup, "test", setup.size.questions)
    questions = [row["question"] for row in rows]
    bare = _answers(setup, "bare", questions, None)
    answers = [answer for _, answer in bare]
    moved = list(zip(questions, [*answers[1:], answers[0]], strict=True))
    report.add("bare answers: AUC of right against wrong pairs", judge.auc(bare, moved), "")
    _add_share(report, "answers to another question", judge, moved)
    _add_share(report, "bare", judge, bare)
    for name, goal in setup.goals(setup.size.steered).items():
        _add_share(report, name, judge, _answers(setup, name, questions, goal))


def _add_share(report: Report, name: str, judge: PairJudge, pairs: Pairs) -> None:
    """Report the share of pairs that the judge calls right."""
    right = [[float(score > THRESHOLD)] for score in judge.score(pairs)]
    value, *bounds = interval(mean_score(right))
    report.add(f"{name}: share that answers the question", value, "", interval=bounds)


def _rows(setup: Setup, split: str, count: int) -> list[dict[str, Any]]:
    """Return rows of the role data, evenly from all, with answers cut to the length of texts."""
    rows = Table(ROLES, "question", where={"split": split}).rows(setup.data)
    rows = [rows[index * len(rows) // count] for index in range(min(count, len(rows)))]
    ids = setup.tokenizer([row["answer"] for row in rows]).input_ids
    answers = [setup.tokenizer.decode(answer[: setup.size.tokens]) for answer in ids]
    return [{**row, "answer": answer} for row, answer in zip(rows, answers, strict=True)]


def _train_pair_judge(setup: Setup, report: Report) -> PairJudge:
    """Train the judge of pairs, and report its AUC on questions that it was not trained on."""
    right, wrong = pairs_of(_rows(setup, "train", setup.size.pairs))
    judge = PairJudge.train(right, wrong, setup.encoder)
    held_out, held_out_wrong = pairs_of(_rows(setup, "test", setup.size.pairs // 4))
    auc = judge.auc(held_out, held_out_wrong)
    report.add("judge of pairs: AUC on other questions", auc, "", at_least=0.7)
    _add_share(report, "answers in the role data", judge, held_out)
    return judge


def _answers(
    setup: Setup, name: str, questions: Sequence[str], goal: ft.CompiledGoal | None
) -> Pairs:
    """Answer every question in a chat; return the questions with their answers."""
    sampling = Sampling(1, setup.size.tokens)
    generator = ContinuationGenerator(setup.lm, setup.tokenizer, sampling, setup.ends, chat=True)
    settings = {
        "lm": lm_identity(setup.lm),
        "hmm": setup.hmm.checksum,
        "goal": None if goal is None else goal_checksum(goal),
        "questions": list(questions),
    }
    prompts = [render_chat(setup.tokenizer, as_messages(question)) for question in questions]
    goals = None if goal is None else [goal] * len(prompts)
    file = setup.folder / "side-effects" / f"{name}.jsonl"
    answers = generator.generate(prompts, Method(name, goals), file, settings)
    return [
        (question, answer.texts[0]) for question, answer in zip(questions, answers, strict=True)
    ]


if __name__ == "__main__":
    main()
