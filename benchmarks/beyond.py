"""What was tried beyond the paper, in one table: what each candidate knows, and what it adds.

SmolLM2 with the HMM of `examples/`. Set FORETRACE_DATA, FORETRACE_ENCODER, FORETRACE_CORPUS (that
the HMM was distilled from) and FORETRACE_RESULTS (where the judges of evaluation.py are, and all
that is made is kept; it takes an hour and goes on where it stopped). Control is held against that
of what is served, at equal perplexity. With --quick, a little of everything, in a folder that is
thrown away: it shows that it runs.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from candidates import head as heads
from candidates import phrases, state_weights
from candidates.evidence import heed
from candidates.reference import Beliefs, Dense, Reference, Weights
from candidates.writing import CandidateSampler, Look, believed
from foretrace import _tables
from foretrace.attribute import LogitAffine, tokenize
from foretrace.distill import Corpus
from foretrace.engines.sampler import Sampler
from foretrace.engines.transformers import decode_after
from foretrace.evaluate import metrics
from foretrace.evaluate.fidelity import concordance
from foretrace.evaluate.generations import encode_from
from foretrace.evaluate.linear_judge import LinearJudge
from foretrace.evaluate.surprise import surprise
from foretrace.hmm import HMM, inference
from harness import Report, options
from smollm2 import find_smollm2

EXAMPLE = Path(__file__).parent.parent / "examples" / "smollm2-135m"
AHEAD, LATER = (1, 4, 16), (2, 10, 19)


@dataclass(frozen=True)
class Size:
    """How much of everything."""

    rollouts: int = 64
    prefixes: int = 60
    texts: int = 20_000
    paths: int = 4_000
    windows: int = 30_000
    prompts: int = 50
    continuations: int = 10


QUICK = Size(4, 2, 600, 64, 64, 2, 2)


@dataclass(frozen=True)
class Task:
    """An attribute, and what control of it is."""

    name: str
    train: str
    validation: str
    text: str
    score: Callable[[dict[str, Any]], float]
    """Of lacking the attribute that is steered toward, or, if absent, of having it."""
    transform: LogitAffine
    absent: bool
    prompts: str
    judge: str
    label: str
    figure: Callable[[Any], metrics.Measurement]
    horizon: int
    points: Sequence[tuple[float, float]]


TASKS = (
    Task(
        "detox-hard",
        "detox/train.jsonl.xz",
        "detox/validation.jsonl.xz",
        "text",
        lambda row: float(row["toxicity"]),
        LogitAffine(10.0, -10.0),
        False,
        "detox/test_prompts_toxic.jsonl.xz",
        "toxicity",
        "1",
        metrics.average_maximum,
        3,
        ((5.0, -15.0), (10.0, -31.0), (20.0, -63.0)),
    ),
    Task(
        "politics",
        "politics/train.jsonl.xz",
        "politics/test.jsonl.xz",
        "description",
        lambda row: float(row["category"] == "POLITICS"),
        LogitAffine(),
        True,
        "detox/test_prompts_nontoxic.jsonl.xz",
        "politics",
        "politics",
        metrics.mean_score,
        19,
        ((1.0, 0.0), (2.0, 0.0), (4.0, 0.0)),
    ),
)


@dataclass(frozen=True)
class Candidate:
    """A way to know more, or to say more."""

    name: str
    look: str = "filter"
    phrases: int = 0
    states: bool = False


CANDIDATES = (
    Candidate("as served"),
    Candidate("LM evidence, half a step", "half"),
    Candidate("LM evidence, two steps", "two"),
    Candidate("context head", "head"),
    Candidate("state weights", states=True),
    Candidate("100 phrases", phrases=100),
    Candidate("300 phrases", phrases=300),
    Candidate("300 phrases, LM evidence, half a step", "half", 300),
)


class Workbench:
    """The language model, its HMM, data, and what was made of them before."""

    def __init__(self, size: Size, kept: Path, judges: Path | None) -> None:
        source = find_smollm2()
        self.size, self.kept, self.judges = size, kept, judges
        self.data = Path(os.environ["FORETRACE_DATA"])
        self.tokenizer = AutoTokenizer.from_pretrained(source)
        self.lm = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
        self.hmm = HMM.from_pretrained(EXAMPLE).to(dtype=torch.float32)
        self.dense = Dense.of(self.hmm)
        self.begin = self.hmm.config.eos_token_ids[0]
        self.ends = self.hmm.config.eos_token_ids
        self.hidden = torch.zeros(0)  # of the LM's last step
        self.caches: dict[int, list[Any]] = {}
        self.lm.get_submodule("model.norm").register_forward_hook(self._remember)
        kept.mkdir(parents=True, exist_ok=True)

    def _remember(self, *given: Any) -> None:
        self.hidden = given[-1][:, -1].float()

    def keep(self, name: str, make: Callable[[], Any]) -> Any:
        """Take what was made before, or make it."""
        file = self.kept / f"{name}.pt"
        if not file.exists():
            made = make()
            torch.save(made, file.with_suffix(".part"))
            file.with_suffix(".part").rename(file)
        return torch.load(file, weights_only=True)

    def rows(self, file: str, count: int) -> list[dict[str, Any]]:
        """Read the first rows of a table."""
        return _tables.read_rows(self.data / file, [])[:count]

    def tokens(self, rows: Sequence[dict[str, Any]], column: str) -> list[list[int]]:
        """Tokenize texts as continuations, as attributes are fitted to them."""
        texts = [str(row[column]) for row in rows]
        whole = tokenize(texts, self.tokenizer, window=1_000_000)
        return [list(map(int, ids)) for ids in whole.token_ids]

    def prompts(self, file: str, count: int) -> tuple[list[str], list[list[int]]]:
        """Read prompts, as texts and as the LM is given them."""
        texts = [str(row["prompt"]) for row in self.rows(file, count)]
        return texts, encode_from(self.tokenizer, texts, self.begin)

    def look(self, name: str) -> Look:
        """Find how what is believed of states is reconsidered."""
        if name == "filter":
            return lambda beliefs, _: beliefs
        if name == "head":
            head = self.head()

            def believe(beliefs: Beliefs, logits: Tensor) -> Beliefs:
                found = head(self.hidden)
                plain = found.repeat_interleave(len(logits) // len(found), 0)
                return replace(beliefs, plain=plain, weighted=plain)

            return believe
        damping, steps = {"half": (0.5, 1), "two": (1.0, 2)}[name]
        return lambda beliefs, logits: heed(self.dense, beliefs, logits.softmax(-1), damping, steps)

    def head(self) -> heads.Head:
        """Train a head on windows of the corpus that the HMM was distilled from."""

        def make() -> dict[str, Tensor]:
            tokens = _first(Corpus(os.environ["FORETRACE_CORPUS"]), self.size.windows)
            before, windows = tokens[:, :12], tokens[:, 12:28]
            hidden = []
            with torch.inference_mode():
                for part in torch.split(before, 250):
                    start = torch.full((len(part), 1), self.begin)
                    self.lm(torch.cat([start, part], 1), logits_to_keep=1)
                    hidden.append(self.hidden)
            return vars(heads.train(self.dense, torch.cat(hidden).clone(), windows, epochs=5))

        return heads.Head(**self.keep("head", make))


def _first(corpus: Corpus, count: int) -> Tensor:
    """Read rows that do not end early, as many as asked for."""
    found: list[Tensor] = []
    end = torch.tensor(corpus.manifest.eos_token_id)
    for batch in corpus.batches(corpus.split(0), 1024, seed=0, epoch=0):
        ended = torch.isin(batch[:, :28].long(), end).any(1)
        whole = batch[~ended]
        found.append(whole.long())
        if sum(map(len, found)) >= count:
            break
    return torch.cat(found)[:count]


def weights_of(bench: Workbench, task: Task, candidate: Candidate) -> tuple[Weights, float]:
    """Fit what a candidate says of a task's attribute; give it with its AUC on validation."""
    rows = bench.rows(task.train, bench.size.texts)
    texts = bench.tokens(rows, task.text)
    has = torch.tensor([1 - task.score(row) for row in rows], dtype=torch.float64)
    targets = task.transform(has).numpy()
    size = bench.hmm.vocab_size

    def fit() -> dict[str, Any]:
        costs, own = phrases.fit(texts, targets, size, candidate.phrases)
        return {"costs": torch.tensor(costs), "phrases": {repr(k): v for k, v in own.items()}}

    fitted = bench.keep(f"{task.name} {candidate.phrases} phrases", fit)
    own = {tuple(map(int, key.strip("()").split(","))): v for key, v in fitted["phrases"].items()}
    costs = fitted["costs"].float()
    states = None
    if candidate.states:
        few = [text[:28] for text in texts[: bench.size.paths]]
        wanted = torch.tensor(targets[: len(few)]).float()
        states = bench.keep(
            f"{task.name} states",
            lambda: state_weights.fit(bench.dense, few, costs, wanted, epochs=4),
        )
    automaton = phrases.Phrases.of(own) if own else phrases.Phrases()
    found = Weights((-costs).exp(), states, automaton, task.absent)
    return found, _auc(bench, task, costs, own, states)


def _auc(
    bench: Workbench,
    task: Task,
    costs: Tensor,
    own: dict[tuple[int, ...], float],
    states: Tensor | None,
) -> float:
    """Rank texts that nothing was fitted to."""
    rows = bench.rows(task.validation, bench.size.texts // 4)
    texts = [text[:28] for text in bench.tokens(rows, task.text)]
    total = torch.tensor([float(costs[list(text)].sum()) for text in texts]).numpy()
    if own:
        total = total - phrases.counts_of(texts, list(own)) @ np.log(list(own.values()))
    if states is not None:
        parts = [texts[at : at + 256] for at in range(0, len(texts), 256)]
        paths = [state_weights.log_paths(bench.dense, states, part) for part in parts]
        total = total - torch.cat(paths).numpy()
    return float(roc_auc_score([task.score(row) > 0.5 for row in rows], total))


def foresight(
    bench: Workbench, look: Look, weights: Weights, costs: Tensor
) -> tuple[dict[int, float], dict[int, float]]:
    """Give the likelihood of the next tokens, in nats each, and concordance within a prefix."""
    reference = Reference(bench.dense, weights, max(LATER))
    likely: dict[int, list[float]] = {count: [] for count in AHEAD}
    pairs = {later: np.zeros(2) for later in LATER}
    for row in rolled(bench):
        bench.hidden = row["hidden"][None]
        before = Beliefs.before(believed(bench.hmm, [row["prefix"]]))
        seen = look(before, row["logits"][None])
        texts = [text for text in row["texts"] if text]
        long = torch.tensor([text[: max(AHEAD)] for text in texts if len(text) >= max(AHEAD)])
        _add_likelihoods(bench.hmm, seen.plain, long, likely)
        firsts = torch.tensor([text[0] for text in texts])
        many = Beliefs(*(part.expand(len(texts), *part.shape[1:]) for part in vars(seen).values()))
        for later in LATER:
            violates = [float(costs[text[1 : later + 1]].sum()) > np.log(2) for text in texts]
            ahead = reference.ahead(many, firsts, later).double().numpy()
            pairs[later] += concordance(ahead, np.array(violates), firsts.numpy())
    shares = {later: float(right / max(count, 1)) for later, (right, count) in pairs.items()}
    return {count: float(np.mean(all_of)) / count for count, all_of in likely.items()}, shares


def _add_likelihoods(hmm: HMM, predicted: Tensor, texts: Tensor, likely: dict[int, Any]) -> None:
    predicted, total = predicted.expand(len(texts), -1), torch.zeros(len(texts))
    for place in range(texts.shape[1] if texts.ndim == 2 else 0):
        stepped = inference.step(hmm, predicted, texts[:, place])
        predicted, total = stepped.predicted, total + stepped.log_probability
        if place + 1 in likely:
            likely[place + 1] += total.tolist()


def rolled(bench: Workbench) -> list[dict[str, Any]]:
    """Let the LM go on from toxic prompts, many times; with its logits and hidden state there."""

    def make() -> list[dict[str, Any]]:
        _, prefixes = bench.prompts("detox/test_prompts_toxic.jsonl.xz", bench.size.prefixes)
        sampler = Sampler(bench.lm, bench.ends, 20, top_p=1.0)
        torch.manual_seed(0)
        found = []
        for prefix in prefixes:
            with torch.inference_mode():
                logits = bench.lm(torch.tensor([prefix])).logits[0, -1].float()
            hidden = bench.hidden[0].clone()
            (drawn,) = sampler.draw([prefix], bench.size.rollouts)
            texts = [[t for t in each.tokens if t not in bench.ends] for each in drawn]
            found.append({"prefix": prefix, "texts": texts, "logits": logits, "hidden": hidden})
        return found

    found: list[dict[str, Any]] = bench.keep("rollouts", make)
    return found


def control(
    bench: Workbench, task: Task, candidate: Candidate, weights: Weights
) -> list[metrics.Point]:
    """Write toward the attribute, more and more strongly; give what it reaches, and its price."""
    reference = Reference(bench.dense, weights, task.horizon)
    look = bench.look(candidate.look)
    return [
        point(
            bench,
            task,
            f"{task.name}, {candidate.name}, {strength:g}",
            CandidateSampler(
                bench.lm, bench.ends, 20, 0.9, bench.hmm, reference, look, strength, shift
            ),
        )
        for strength, shift in task.points
    ]


def point(bench: Workbench, task: Task, name: str, sampler: Sampler) -> metrics.Point:
    """Write, judge, and let the LM read what was written."""
    texts, prompts = bench.prompts(task.prompts, bench.size.prompts)

    def write() -> list[list[str]]:
        found = []
        for at in range(0, len(prompts), 25):
            torch.manual_seed(at)
            drawn = sampler.draw(prompts[at : at + 25], bench.size.continuations)
            for prompt, own in zip(prompts[at : at + 25], drawn, strict=True):
                found.append([decode_after(bench.tokenizer, prompt, each.tokens) for each in own])
        return found

    written = bench.keep(f"{name} texts", write)
    judged = bench.keep(f"{name} judged", lambda: _judge(bench, task, written))
    nats = bench.keep(
        f"{name} nats",
        lambda: surprise(bench.lm, bench.tokenizer, texts, written, begin=bench.begin),
    )
    return metrics.Point(task.figure(judged), metrics.perplexity(nats))


def _judge(bench: Workbench, task: Task, written: list[list[str]]) -> list[list[float]]:
    """Ask the judge of the evaluation; where there is none, count words, so that it runs."""
    flat = [text for own in written for text in own]
    scores = iter([float(len(text.split())) for text in flat])
    if bench.judges is not None:
        scores = iter(LinearJudge.load(bench.judges / task.judge).scorer(task.label)(flat))
    return [[next(scores) for _ in own] for own in written]


def compare(bench: Workbench, report: Report) -> None:
    """Measure every candidate."""
    for task in TASKS:
        bare = point(bench, task, f"{task.name}, bare", Sampler(bench.lm, bench.ends, 20, 0.9))
        report.add(f"{task.name}, bare", bare.figure.value, "")
        served: list[metrics.Point] = []
        for candidate in CANDIDATES:
            weights, auc = weights_of(bench, task, candidate)
            report.add(f"{task.name}, {candidate.name}: AUC on validation", auc, "")
            if task.name == "detox-hard":
                _add_foresight(bench, candidate, weights, report)
            found = control(bench, task, candidate, weights)
            _add_control(report, f"{task.name}, {candidate.name}", found, served, bare)
            served = served or found


def _add_foresight(
    bench: Workbench, candidate: Candidate, weights: Weights, report: Report
) -> None:
    costs = bench.keep("detox-hard 0 phrases", dict)["costs"].float()
    likely, shares = foresight(bench, bench.look(candidate.look), weights, costs)
    for count, nats in likely.items():
        report.add(f"{candidate.name}: next {count} tokens", nats, "nats each")
    for later, share in shares.items():
        report.add(f"{candidate.name}: concordance, tokens 2 to {later + 1}", share, "")


def _add_control(
    report: Report,
    name: str,
    found: Sequence[metrics.Point],
    served: Sequence[metrics.Point],
    bare: metrics.Point,
) -> None:
    """Report the strongest point, and all that is gained at the perplexity of what is served."""
    report.add(f"{name}: strongest", found[-1].figure.value, "")
    rise = found[-1].price.value / bare.price.value - 1
    report.add(f"{name}: strongest, perplexity against bare", rise, "")
    if served:
        gain = metrics.at_equal_price(served[-1], found, bare.figure.value)
        for part, value in (gain._asdict() if gain else {}).items():
            report.add(f"{name}: against as served, at equal perplexity, {part}", value, "")


def costs(bench: Workbench, report: Report) -> None:
    """Measure what a step would add: the products of evidence, and a second filter."""
    for batch in (1, 32):
        ids = torch.randint(3, bench.hmm.vocab_size, (batch, 12))
        predicted = believed(bench.hmm, ids.tolist())
        step = _seconds(partial(_step, bench, ids))
        heeded = _seconds(partial(_evidence, bench.hmm, predicted))
        filtered = _seconds(partial(inference.step, bench.hmm, predicted, ids[:, 0]))
        report.add(f"batch {batch}: evidence", heeded / step, "of the LM", at_most=0.03)
        report.add(
            f"batch {batch}: a second filter adds", filtered / step, "of the LM", at_most=0.05
        )


@torch.inference_mode()
def _step(bench: Workbench, ids: Tensor) -> None:
    """Let the LM write a token after some."""
    cache = bench.caches.setdefault(len(ids), [])
    if not cache:
        cache.append(bench.lm(ids, use_cache=True).past_key_values)
    bench.lm(ids[:, :1], past_key_values=cache[0], use_cache=True, logits_to_keep=1)


def _evidence(hmm: HMM, predicted: Tensor) -> None:
    """Do the two products of a step of evidence, as they would be served."""
    ratio = 1 / hmm.emission.predict(predicted).clamp_min(1e-30)
    hmm.emission.expect(ratio, torch.arange(hmm.vocab_size))


def _seconds(work: Callable[[], Any]) -> float:
    times = []
    for _ in range(6):
        began = perf_counter()
        work()
        times.append(perf_counter() - began)
    return sorted(times[1:])[2]


def main() -> None:
    """Measure everything."""
    given = options(__doc__)
    report = Report("Beyond the paper")
    if given.quick:
        with tempfile.TemporaryDirectory() as scratch:
            bench = Workbench(QUICK, Path(scratch), None)
            costs(bench, report)
            compare(bench, report)
    else:
        kept = Path(os.environ["FORETRACE_RESULTS"])
        bench = Workbench(Size(), kept / "beyond", kept / "judges")
        costs(bench, report)
        compare(bench, report)
    report.publish(given.json)


if __name__ == "__main__":
    main()
