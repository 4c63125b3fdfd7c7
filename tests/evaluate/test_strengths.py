"""Test calibration: prices, the strengths of levels, and methods at equal price."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs the extra `transformers`")
pytest.importorskip("yaml", reason="needs the extra `evaluate`")


from foretrace.attribute import AttributeStore
from foretrace.engines.transformers.calibration import SteeredRuns
from foretrace.engines.transformers.sampler import Sampler
from foretrace.errors import InvalidInputError
from foretrace.evaluate import continuations, strengths
from foretrace.evaluate.run import EvaluationConfig, evaluate
from foretrace.evaluate.strengths import StrengthCache, read_calibration_prompts
from foretrace.evaluate.suite import load_suite
from foretrace.lookahead.levels import BUDGETS
from tiny_lm import tiny_hmm, word_tokenizer

SUITE = """
prompts: {file: prompts.jsonl, text: prompt}
continuations: 2
max_new_tokens: 5
attributes:
  low: {file: scored.jsonl, score: high, invert: true, objective: cross-entropy}
methods:
  bare: {}
  mild: {goals: low, level: mild}
  no lookahead: {goals: low, horizon: 0, match_price: mild}
judges:
  itself: {figures: [mean], attribute: low}
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    scored = []
    for number in range(120):
        high = number % 2
        words = [f"w{(number * step) % 30 + 30 * high}" for step in (1, 3, 7, 11)]
        scored.append({"text": " ".join(words), "high": high})
    prompts = [{"prompt": f"w{number} w2"} for number in range(1, 4)]
    for name, rows in (("scored", scored), ("prompts", prompts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "mine.yaml").write_text(SUITE)
    return folder


@pytest.fixture(scope="module")
def lm(tiny_lm: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_lm, dtype=torch.float32)


def test_levels_have_their_price_and_methods_match(
    data: Path, lm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(continuations, "TIMED_RUNS", 1)
    suite = load_suite(data / "mine.yaml")
    config = EvaluationConfig(data, tmp_path)
    results = evaluate(suite, lm, word_tokenizer(), tiny_hmm(word_tokenizer()), config)
    searches = json.loads((tmp_path / "calibration.json").read_text())["searches"]
    levels = results["calibration"]["levels"]["low"]
    assert AttributeStore(tmp_path / "attributes")["low"].config.levels == levels
    (prices,) = [one["prices"] for name, one in searches.items() if name.startswith("low ")]
    assert prices[repr(levels["mild"])] == pytest.approx(BUDGETS["mild"], rel=0.1)
    matched = results["calibration"]["matched"]["no lookahead"]
    (prices,) = [one["prices"] for name, one in searches.items() if " for " in name]
    assert prices[repr(matched["factor"])] == pytest.approx(matched["price"], rel=0.1)
    assert matched["price"] == pytest.approx(BUDGETS["mild"], rel=0.15)
    figures = {name: method["figures"] for name, method in results["methods"].items()}
    assert figures["bare"]["price"]["value"] == 0
    assert figures["mild"]["price"]["low"] <= figures["mild"]["price"]["high"]
    assert figures["mild"]["price"]["value"] > 0

    # A finished run measures nothing.
    monkeypatch.delattr(Sampler, "draw")
    monkeypatch.delattr(SteeredRuns, "price")
    hmm = tiny_hmm(word_tokenizer())
    assert evaluate(suite, lm, word_tokenizer(), hmm, config) == results


def test_evaluated_prompts_are_not_used_for_calibration(data: Path, tmp_path: Path) -> None:
    rows, column = read_calibration_prompts(load_suite(data / "mine.yaml"), data)
    assert column == "text"
    assert len(rows) == strengths.NUM_PROMPTS
    assert all(len(row["text"].split()) <= strengths.OPENING_WORDS for row in rows)
    suite = tmp_path / "other.yaml"
    suite.write_text(SUITE + "calibration: {file: prompts.jsonl, text: prompt}\n")
    with pytest.raises(InvalidInputError, match="other prompts"):
        read_calibration_prompts(load_suite(suite), data)


def test_strengths_are_searched_again_with_other_settings(tmp_path: Path) -> None:
    tried: list[float] = []

    def price(strength: float) -> float:
        tried.append(strength)
        return float(0.01 * strength**2)

    file = tmp_path / "calibration.json"
    first = StrengthCache(file, {"lm": "a"}).find("low", price, "medium", 0.09, 2.0)
    assert first == pytest.approx(3, rel=0.1)
    count = len(tried)
    assert StrengthCache(file, {"lm": "a"}).find("low", price, "medium", 0.09, 2.0) == first
    assert len(tried) == count
    assert StrengthCache(file, {"lm": "b"}).find("low", price, "medium", 0.09, 2.0) == first
    assert len(tried) == 2 * count


def test_an_interrupted_search_resumes_with_the_same_strength(tmp_path: Path) -> None:
    def price(strength: float) -> float:
        return float(0.01 * strength**1.5)

    def interrupted(strength: float) -> float:
        if strength > 4:
            raise KeyboardInterrupt
        return price(strength)

    whole = StrengthCache(tmp_path / "whole.json", {}).find("low", price, "medium", 0.09, 2.0)
    assert whole == pytest.approx(9 ** (1 / 1.5), rel=0.1)
    file = tmp_path / "interrupted.json"
    with pytest.raises(KeyboardInterrupt):
        StrengthCache(file, {}).find("low", interrupted, "medium", 0.09, 2.0)
    assert json.loads(file.read_text())["searches"]["low"]["prices"]
    assert StrengthCache(file, {}).find("low", price, "medium", 0.09, 2.0) == whole
