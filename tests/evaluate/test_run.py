"""Test an evaluation on a tiny LM: results, resuming, and the report."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `transformers`")
pytest.importorskip("yaml", reason="needs the extra `evaluate`")

from foretrace.attribute import Attribute
from foretrace.engines.transformers.sampler import Sampler
from foretrace.errors import InvalidFileError, InvalidInputError
from foretrace.evaluate import continuations, preparation, strengths
from foretrace.evaluate.continuations import (
    ContinuationGenerator,
    Method,
    Sampling,
)
from foretrace.evaluate.linear_judge import LinearJudge
from foretrace.evaluate.preparation import fit_attributes
from foretrace.evaluate.report import write_report
from foretrace.evaluate.run import EvaluationConfig, evaluate
from foretrace.evaluate.scoring import Scorer
from foretrace.evaluate.suite import add_rival_hmm, load_suite
from foretrace.hmm import HMM
from forked import Run
from tiny_lm import tiny_hmm, word_tokenizer

SUITE = """
prompts: {file: prompts.jsonl, text: prompt}
template: "w9 {prompt}"
group: author
rival: prompting
continuations: 4
max_new_tokens: 6
attributes:
  low: {file: scored.jsonl, score: high, invert: true, keep: [w33]}
  author: {file: scored.jsonl, by: author, objective: evidence}
  product author: {file: scored.jsonl, by: author, suffix: " (product)", objective: cross-entropy}
methods:
  bare: {}
  prompting: {instruction: "w1 w2 {prompt} {author}"}
  steered: {goals: low, strength: 2, curve: a}
  own author: {goals: ['"{author} (product)"', low], transform: [[2, 0], [1, 0]], curve: a}
  level: {goals: low, level: strong}
  conjunction: {goals: [low, '"{author}"']}
  no lookahead: {goals: low, horizon: 0, match_price: level}
  best of 2: {best_of: 2, best_by: low}
judges:
  high:
    figures: [average_maximum, probability_of_any, mean]
    train: {file: scored.jsonl}
    label: high
    judged: "1"
    calibration: {file: scored.jsonl}
    calibration_score: high
  author:
    figures: [mean]
    train: {file: scored.jsonl}
    label: author
    judged: "{author}"
  itself: {figures: [mean], attribute: low}
"""
METHODS = [
    "bare",
    "prompting",
    "steered",
    "own author",
    "level",
    "conjunction",
    "no lookahead",
    "best of 2",
]


CHAT_SUITE = """
extends: {base}
chat: true
template: "w9 {{prompt}}"
max_new_tokens: 70
continuations: 2
group: null
rival: null
attributes:
  low: {{file: scored.jsonl, score: high, invert: true}}
methods:
  bare: {{}}
  prompting: {{instruction: "w1 w2 {{author}}"}}
  level: {{goals: low, level: strong}}
judges:
  high:
    figures: [mean]
    train: {{file: scored.jsonl}}
    label: high
    judged: "1"
"""
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'system' %}w60 {% else %}w61 {% endif %}"
    "{{ message.content }} {% endfor %}{% if add_generation_prompt %}w62{% endif %}"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    scored, prompts = [], []
    for number in range(120):
        high = number % 2
        words = [f"w{(number * step) % 30 + 30 * high}" for step in (1, 3, 7, 11)]
        author = f"Author {number % 3}"
        text = " ".join([*words, f"w{number % 3}"])
        scored.append({"text": text, "high": high, "author": author})
        prompts.append({"prompt": f"w{number % 60}", "author": author})
    for name, rows in (("scored", scored), ("prompts", prompts[:10])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "mine.yaml").write_text(SUITE)
    return folder


@pytest.fixture(scope="module", autouse=True)
def one_timed_run() -> Iterator[None]:
    """Measure the relative cost of a method once, to save time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(continuations, "TIMED_RUNS", 1)
        yield


@pytest.fixture(scope="module")
def lm(tiny_lm: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_lm, dtype=torch.float32)


@pytest.fixture(scope="module")
def hmm() -> HMM:
    return tiny_hmm(word_tokenizer())


def run_suite(data: Path, out: Path | str, lm: Any, hmm: HMM, **options: Any) -> dict[str, Any]:
    suite = load_suite(data / "mine.yaml")
    config = EvaluationConfig(data, out, rows=16, **options)
    return evaluate(suite, lm, word_tokenizer(), hmm, config)


@pytest.fixture(scope="module")
def done(
    data: Path, lm: Any, hmm: HMM, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("out")
    return out, run_suite(data, out, lm, hmm)


def test_words_that_are_kept_do_not_decide(done: tuple[Path, dict[str, Any]]) -> None:
    attribute = Attribute.load(done[0] / "attributes" / "low.safetensors")
    tokens = word_tokenizer()(["w33", "w31"], add_special_tokens=False).input_ids
    kept, other = attribute.probability(tokens).tolist()
    nothing = attribute.probability([[]]).item()
    assert kept == nothing
    assert other != nothing


def test_attributes_with_equal_texts_and_scores_share_a_teacher(
    data: Path, lm: Any, hmm: HMM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted: list[list[float]] = []
    monkeypatch.setattr(
        preparation, "fit_teacher", lambda lm, tokenizer, texts, scores: fitted.append(scores)
    )
    suite = load_suite(data / "mine.yaml")
    low = suite.attributes["low"]
    plans = {
        "low": low,
        "other words": replace(low, keep=["w34"]),
        "product": replace(low, objective="cross-entropy"),
        "high": replace(low, invert=False),
    }
    suite = replace(suite, attributes=plans)
    store = fit_attributes(suite, data, tmp_path, lm, word_tokenizer(), hmm)
    assert sorted(store) == sorted(plans)
    first, second = fitted
    assert [1 - score for score in first] == second


def test_prompts_are_skipped(data: Path, lm: Any, hmm: HMM, tmp_path: Path) -> None:
    skipping = replace(load_suite(data / "mine.yaml"), skip=7)
    config = EvaluationConfig(data, tmp_path, methods=("bare",), rows=16)
    results = evaluate(skipping, lm, word_tokenizer(), hmm, config)
    assert results["prompts"] == 3
    with pytest.raises(InvalidInputError, match="skips 10 prompts, and has no more than 10"):
        evaluate(replace(skipping, skip=10), lm, word_tokenizer(), hmm, config)


def test_every_method_has_every_metric(done: tuple[Path, dict[str, Any]]) -> None:
    _, results = done
    assert list(results["methods"]) == METHODS
    names = {
        "perplexity",
        "words",
        "blank",
        "dist-2",
        "dist-3",
        "high, average maximum",
        "high, probability of any",
    }
    for name, method in results["methods"].items():
        figures = method["figures"]
        assert names | {"high, mean", "author, mean", "itself, mean"} <= set(figures)
        assert ("entropy" in figures) == (name != "best of 2")
        assert all(figure["low"] <= figure["high"] for figure in figures.values())
        assert ("relative" in figures["perplexity"]) == (name != "bare")
    assert results["methods"]["bare"]["cost"] == 1
    assert results["judges"]["high"]["auc at 0.5"] > 0.9
    assert results["judges"]["high"]["false alarms"] < 0.2


@pytest.fixture(scope="module")
def chats(
    data: Path, lm: Any, hmm: HMM, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """A suite of chats with texts of two blocks, and another HMM at equal price."""
    out = tmp_path_factory.mktemp("chats")
    other = tiny_hmm(word_tokenizer(), states=4)
    other.save_pretrained(out / "small")
    (data / "chat.yaml").write_text(CHAT_SUITE.format(base=data / "mine.yaml"))
    suite = add_rival_hmm(load_suite(data / "chat.yaml"), str(out / "small"))
    tokenizer = word_tokenizer(chat_template=CHAT_TEMPLATE)
    with pytest.MonkeyPatch.context() as patch:  # short runs, to save time
        patch.setattr(strengths, "NUM_PROMPTS", 8)
        patch.setattr(strengths, "COPIES", 2)
        config = EvaluationConfig(data, out, rows=32)
        return out, evaluate(suite, lm, tokenizer, hmm, config)


def test_chats_go_through_the_template(chats: tuple[Path, dict[str, Any]], lm: Any) -> None:
    tokenizer = word_tokenizer(chat_template=CHAT_TEMPLATE)
    generator = ContinuationGenerator(lm, tokenizer, Sampling(), [0], bos_token_id=0, chat=True)
    assert generator.encode(["w61 w9 w1 w62"]) == [[62, 10, 2, 63]]  # no token is prepended


def test_every_block_has_its_figures(chats: tuple[Path, dict[str, Any]]) -> None:
    out, results = chats
    names = ["high, mean", "perplexity", "dist-3", "repetition", "reached"]
    for name, method in results["methods"].items():
        figures, blocks = method["figures"], method["blocks"]
        assert [list(block) for block in blocks] == [names, names]
        assert blocks[0]["reached"]["value"] == pytest.approx(1 - figures["blank"]["value"])
        assert blocks[1]["reached"]["value"] <= blocks[0]["reached"]["value"]
        assert figures["ended early"]["value"] == pytest.approx(
            1 - _share_of_length(out, name, 70), abs=1e-9
        )
        assert figures["tokens"]["value"] <= 70
        if name == "bare":
            ratios = [figure["ratio"][0] for block in blocks for figure in block.values()]
            assert [ratio for ratio in ratios if ratio is not None] == pytest.approx(
                [1.0] * sum(ratio is not None for ratio in ratios)
            )
    report = write_report(results, out).read_text()
    assert "| level | 65 to 70 | " in report
    assert "| level, small | level | " in report.split("## At equal price")[1]


def _share_of_length(out: Path, method: str, length: int) -> float:
    """Return the share of a method's texts that have so many tokens."""
    lines = (out / "generations" / f"{method}.jsonl").read_text().splitlines()[1:]
    counts = [count for line in lines for count in json.loads(line)["tokens"]]
    return counts.count(length) / len(counts)


def test_another_hmm_steers_at_the_same_price(chats: tuple[Path, dict[str, Any]]) -> None:
    _, results = chats
    assert list(results["methods"]) == ["bare", "prompting", "level", "level, small"]
    ours, theirs = (results["methods"][name]["figures"] for name in ("level", "level, small"))
    assert theirs["price"]["value"] == pytest.approx(ours["price"]["value"], rel=0.4)
    assert theirs["high, mean"]["value"] != ours["high, mean"]["value"]
    (comparison,) = results["at equal price"]
    assert (comparison["method"], comparison["matched"]) == ("level, small", "level")
    value, low, high = comparison["figures"]["high, mean"]["difference"]
    assert low <= value <= high
    expected = theirs["high, mean"]["value"] - ours["high, mean"]["value"]
    assert value == pytest.approx(expected)


def test_steering_changes_the_judged_attribute(done: tuple[Path, dict[str, Any]]) -> None:
    figures = {name: method["figures"] for name, method in done[1]["methods"].items()}
    for name in ("steered", "no lookahead", "best of 2"):
        assert figures[name]["itself, mean"]["value"] > figures["bare"]["itself, mean"]["value"]
        assert figures[name]["high, mean"]["value"] < figures["bare"]["high, mean"]["value"]


def test_a_finished_run_generates_nothing(
    done: tuple[Path, dict[str, Any]],
    data: Path,
    lm: Any,
    hmm: HMM,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, results = done
    monkeypatch.delattr(Sampler, "draw")
    assert run_suite(data, str(out), lm, hmm, judges=str(out / "judges")) == results


def test_an_interrupted_run_resumes_with_the_same_results(
    done: tuple[Path, dict[str, Any]], data: Path, lm: Any, hmm: HMM, tmp_path: Path
) -> None:
    options = {"methods": ("steered",), "judges": done[0] / "judges"}
    run_suite(data, tmp_path, lm, hmm, **options)
    file = tmp_path / "generations" / "steered.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text(
        "".join(lines[:6]) + lines[6][:20]
    )  # as if the process was killed while writing
    resumed = run_suite(data, tmp_path, lm, hmm, **options)
    assert list(resumed["methods"]) == ["bare", "steered"]
    for name, method in resumed["methods"].items():
        assert method["figures"] == done[1]["methods"][name]["figures"]
    with pytest.raises(InvalidFileError, match="other settings"):
        run_suite(data, tmp_path, lm, hmm, **options, seed=1)
    with pytest.raises(InvalidInputError, match="no method 'stered'"):
        run_suite(data, tmp_path, lm, hmm, methods=("stered",))


def test_calibration_scores_are_kept_beside_the_judge(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = load_suite(data / "mine.yaml").judges["high"]

    def describe(suite: str) -> dict[str, Any]:
        folders = (data, tmp_path / suite, tmp_path / "judges")
        scorer = Scorer("high", plan, *folders, None, "cpu", prompts=[])
        return scorer.describe()

    first = describe("one suite")
    monkeypatch.delattr(LinearJudge, "train")
    monkeypatch.delattr(LinearJudge, "probabilities")
    assert describe("another suite") == first


def test_report_has_a_row_for_every_method(done: tuple[Path, dict[str, Any]]) -> None:
    out, results = done
    text = write_report(results, str(out)).read_text()
    assert all(f"| {name} |" in text for name in METHODS)
    assert "trade-off.png" in text
    assert (out / "trade-off.png").read_bytes().startswith(b"\x89PNG")
    assert "the attribute low itself" in text
    assert "| steered | " in text.split("group by group")[1]
    assert "of 3 |" in text
    assert (out / "groups.png").read_bytes().startswith(b"\x89PNG")


def test_evaluate_command(
    done: tuple[Path, dict[str, Any]],
    data: Path,
    tiny_lm: Path,
    hmm: HMM,
    tmp_path: Path,
    run: Run,
) -> None:
    hmm.save_pretrained(tmp_path / "hmm")
    tiny_hmm(word_tokenizer(), states=4).save_pretrained(tmp_path / "small")
    options = ["--suite", data / "mine.yaml", "--data", data, "--out", tmp_path / "out"]
    options += ["--prompts", 4, "--continuations", 2, "--method", "steered", "--method", "level"]
    options += ["--rival-hmm", tmp_path / "small"]
    options += ["--judges", done[0] / "judges"]
    ran = run("evaluate", tiny_lm, "--hmm", tmp_path / "hmm", *options)
    assert ran.code == 0, ran.err
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["prompts"] == 4
    assert list(results["methods"]) == ["bare", "steered", "level", "level, small"]
    assert results["other hmms"] == {"small": {"states": 4}}


def test_judge_train_command(run: Run, data: Path, tmp_path: Path) -> None:
    options = ["--label", "author", "--out", tmp_path / "judge"]
    trained = run("judge", "train", data / "scored.jsonl", *options)
    assert trained.code == 0
    assert "3 classes" in trained.out


def test_generation_with_and_without_a_first_token(lm: Any, tmp_path: Path) -> None:
    sampling = Sampling(continuations=3, max_new_tokens=4, rows=6)
    for bos_token_id in (None, 0):
        generator = ContinuationGenerator(lm, word_tokenizer(), sampling, [0], bos_token_id)
        file = tmp_path / f"{bos_token_id}.jsonl"
        continued = generator.generate(["w1", "w2"], Method("bare"), file, {})
        assert [len(generation.texts) for generation in continued] == [3, 3]


def test_texts_without_losses_are_refused(lm: Any, tmp_path: Path) -> None:
    sampling = Sampling(continuations=1, max_new_tokens=2)
    generator = ContinuationGenerator(lm, word_tokenizer(), sampling, [0], 0)
    file = tmp_path / "bare.jsonl"
    generator.generate(["w1"], Method("bare"), file, {})
    settings, row = map(json.loads, file.read_text().splitlines())
    del row["bare_nats"]
    file.write_text(f"{json.dumps(settings)}\n{json.dumps(row)}\n")
    with pytest.raises(InvalidFileError, match=r"lacks 'bare_nats'.* Remove the file"):
        generator.generate(["w1"], Method("bare"), file, {})


def test_costs_are_ratios_within_a_turn(lm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that becomes slower from turn to turn does not change them."""
    calls: list[tuple[str, int]] = []

    def fake_time(self: Any, prompts: Any, method: Method, tokens: int) -> float:
        calls.append((method.name, tokens))
        turn = sum(name == "bare" for name, _ in calls)
        return float(10**turn * {"bare": 1, "a": 2, "b": 3}[method.name])

    monkeypatch.setattr(ContinuationGenerator, "_time", fake_time)
    monkeypatch.setattr(continuations, "TIMED_RUNS", 3)
    generator = ContinuationGenerator(lm, word_tokenizer(), Sampling(), [0], 0)
    bare, a, b = (Method(name) for name in ("bare", "a", "b"))
    assert generator.relative_costs(["w1"], [a, b], bare) == {"a": 2.0, "b": 3.0}
    assert [name for name, _ in calls] == ["bare", "a", "b"] * 4
    assert [tokens for _, tokens in calls] == [continuations.WARM_UP_TOKENS] * 3 + [20] * 9
