"""Test the suites and the page that compare foretrace with other methods."""

import sys
from collections.abc import Mapping
from dataclasses import asdict
from math import exp, log
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs the extra `transformers`")
pytest.importorskip("yaml", reason="needs the extra `evaluate`")
pytest.importorskip("matplotlib", reason="needs the extra `evaluate`")

from foretrace import _io
from foretrace.errors import InvalidFileError
from foretrace.evaluate.suite import MethodPlan, load_suite
from page_runner import PROJECT

sys.path.insert(0, str(PROJECT / "benchmarks"))

from peers import judges
from peers.comparisons import COSTS, excess
from peers.facts import FACTS
from peers.kept import KeptMethod, KeptTexts
from peers.page import Made
from peers.parts import checksum
from peers.run import FOLDER, write
from peers.scores import OWN, Scored, compare_methods
from peers.sizes import Sizes, serving_needs

VARIANTS = ["prompting + foretrace", "control vector + foretrace", "DExperts without filter"]
SUITES = ["detox-hard", "sentiment", "politics"]
SIZES = Sizes(
    lm=538_000_000,
    cached_token=46_080,
    hmm=100_000_000,
    attribute=500_000,
    vector=70_000,
    lm_steer=300_000,
    bias=200_000,
    subspace=2_000,
    expert=10_000_000,
    anti_expert=10_000_000,
)


@pytest.mark.parametrize("name", SUITES)
def test_every_suite_has_every_method_as_a_curve(name: str) -> None:
    suite = load_suite(PROJECT / "benchmarks" / "peers" / f"{name}.yaml")
    assert (suite.continuations, suite.max_new_tokens) == (25 if name == "detox-hard" else 10, 20)
    assert len(suite.judges) == (2 if name == "politics" else 3)
    assert set(suite.judges) <= set(judges.ABOUT)
    curves: dict[str, list[MethodPlan]] = {}
    for method, plan in suite.methods.items():
        if method != "bare":
            assert plan.curve is not None
            curves.setdefault(plan.curve, []).append(plan)
    assert set(curves) == {*FACTS, *VARIANTS}
    for curve in ("foretrace", "control vector", "LM-Steer", "DExperts"):
        assert len(curves[curve]) >= 3
    assert all(len(plans) <= 3 for curve, plans in curves.items() if curve != "foretrace")
    attribute = next(iter(suite.attributes))
    for plans in curves.values():
        for plan in plans:
            assert plan.options.get("attribute", attribute) == attribute
            assert plan.goals in ((), (attribute,))


def _figure(value: float) -> dict[str, Any]:
    return {"value": value, "low": value - 0.1, "high": value + 0.1, "dropped": 0}


METHODS: dict[str, tuple[str | None, float, float]] = {
    # the curve, the score of every text, and the loss of every text
    "bare": (None, 0.7, 3.0),
    "foretrace, mild": ("foretrace", 0.5, 3.1),
    "foretrace, strong": ("foretrace", 0.3, 3.3),
    "DExperts, 1": ("DExperts", 0.4, 2.5),
    "prompting": ("prompting", 0.6, 3.2),
    "best of 4": ("best of n", 0.2, 4.0),
}
JUDGES = ("toxicity", "toxicity, profanity-check")
ENTROPY = {"DExperts, 1": 1.0}  # nats per token; 2.5 for the other methods


def results() -> Mapping[str, Any]:
    def describe(name: str, curve: str | None, score: float, loss: float) -> dict[str, Any]:
        figures = {f"{judge}, average maximum": _figure(score) for judge in JUDGES}
        figures["perplexity"] = _figure(exp(loss))
        if curve in (None, "foretrace", "DExperts"):
            figures["price"] = _figure(0.1)
        plan = {"curve": curve, "best_of": 4 if name == "best of 4" else 1}
        return {"plan": plan, "cost": 1.5, "figures": figures}

    return {
        "lm": "my-lm",
        "hmm": {"states": 8},
        "prompts": 3,
        "sampling": {"continuations": 2, "max_new_tokens": 20, "top_p": 0.9, "seed": 0},
        "baseline": "bare",
        "methods": {name: describe(name, *facts) for name, facts in METHODS.items()},
    }


@pytest.fixture
def kept(tmp_path: Path) -> KeptTexts:
    """Collect texts from a folder such as `foretrace evaluate` writes."""
    for name, (_, _, loss) in METHODS.items():
        price = {"foretrace, mild": 0.1, "foretrace, strong": 0.4, "DExperts, 1": 0.2}.get(name, 0)
        row = {
            "texts": [f"{name}\u2028", "b"],
            "tokens": [20, 20],
            "nats": [20 * ENTROPY.get(name, 2.5)] * 2,
            "prices": [price] * 2,
        }
        rows = [{"prompt": index, **row} for index in (1, 0, 2)]
        _io.write_lines(tmp_path / "generations" / f"{name}.jsonl", [{"settings": {}}, *rows])
        _io.write_json(tmp_path / "surprise" / f"{name}.json", {"nats": [[loss, loss]] * 3})
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("{}")
    return KeptTexts.collect("detox-hard", results(), tmp_path, prompts)


FACTS_OF_JUDGE = {
    "judge": "j",
    "calibrated on": "f",
    "texts": 9,
    "auc at 0.5": 0.9,
    "spearman": 0.5,
}


def judged(kept: KeptTexts) -> KeptTexts:
    scores = {
        judge: {
            name: [[score / scale, (score - 0.1) / scale]] * 3
            for name, (_, score, _) in METHODS.items()
        }
        for scale, judge in enumerate(JUDGES, 1)
    }
    own = {name: [[1 - score, None]] * 3 for name, (_, score, _) in METHODS.items()}
    kept = kept.judged({OWN: own}).judged(scores)
    return kept.record(judges=dict.fromkeys(JUDGES, FACTS_OF_JUDGE))


def scored(kept: KeptTexts) -> Scored:
    return compare_methods(judged(kept), load_suite(FOLDER / "detox-hard.yaml"))


def test_kept_texts_are_read_as_written(kept: KeptTexts, tmp_path: Path) -> None:
    kept = judged(kept)
    file = kept.write(tmp_path)
    assert file.name == "detox-hard.jsonl.xz"
    assert KeptTexts.read(file) == kept
    assert kept.num_texts == 36
    assert kept.methods["prompting"].prices == [[], [], []]
    content = file.read_bytes()
    assert kept.write(tmp_path).read_bytes() == content
    file.write_bytes(content[:-40])
    with pytest.raises(InvalidFileError, match="not a file of kept texts"):
        KeptTexts.read(file)


def test_a_lower_entropy_does_not_lower_the_excess(kept: KeptTexts) -> None:
    costs = scored(kept).measured.costs
    assert costs["perplexity"]["DExperts, 1"].value < costs["perplexity"]["bare"].value
    assert costs["excess cross-entropy"]["bare"].value == pytest.approx(0.5)
    assert costs["excess cross-entropy"]["DExperts, 1"].value == pytest.approx(1.5)
    bound = (log(4) - 3 / 4) / 20
    assert costs["price"]["best of 4"].value == pytest.approx(bound)
    assert costs["excess cross-entropy"]["best of 4"].value == pytest.approx(1.5 + bound)
    assert "prompting" not in costs["price"]


def test_texts_that_ended_early_have_no_excess() -> None:
    method = KeptMethod(None, 1, False, [["a", "b"]], [[20, 3]], [[50.0, 4.0]], [[3.0, 9.0]], [[]])
    measurement = excess(method, 20)
    assert (measurement.totals.tolist(), measurement.counts.tolist()) == ([10.0], [20.0])


def test_every_cost_has_its_own_verdict(kept: KeptTexts) -> None:
    measured = scored(kept).measured

    def compare(rival: str) -> list[str]:
        return [measured.compare("toxicity", cost, rival).verdict for cost in COSTS]

    assert compare("DExperts, 1") == ["below", "ahead", "behind"]
    assert compare("prompting") == ["ahead", "ahead", "unknown"]
    best = measured.compare("toxicity", "perplexity", "best of 4")
    assert (best.verdict, best.beyond) == ("behind", True)
    assert best.difference is not None
    assert best.difference.value == pytest.approx(0.1)


def test_the_page_has_every_part(kept: KeptTexts, tmp_path: Path) -> None:
    made = Made("control vector", "nontoxic", 61.2, 2000)
    facts = {"made": [made._asdict()], "texts of a side": 5000, "skip": 200, "sizes": asdict(SIZES)}
    facts["instruction tokens"] = 20
    file = judged(kept).record(**facts).write(tmp_path / "generations")
    text = write(tmp_path).read_text()
    assert "| prompting | 0.6 [0.5, 0.7] | 0.6 [0.5, 0.7] | 24.5 [24.4, 24.6] |  |" in text
    assert "| DExperts, 1 | below | **ahead**\u2020 -0.100 [-0.100, -0.100] | **behind** " in text
    assert "**behind**\u2020 +0.100" in text
    assert "- It depends on the judge or the cost: DExperts, 1." in text
    assert "rank correlation of the first two judges is 1.00 over the 36 texts" in text
    assert "| control vector | nontoxic | 2,000 | 61.2 |" in text
    assert "at most 5,000 texts of a side" in text
    assert "The first 200 prompts are left out" in text
    assert "| DExperts | **ahead** -0.100 [-0.100, -0.100] | " in text
    assert "| best of 4 | 0.8 [0.8, 0.8] | **behind**\u2020 -0.100 [-0.100, -0.100] |" in text
    assert "| bare | 0.3 [0.3, 0.3] |  |" in text
    assert "- **GeDi**: " in text
    image = tmp_path / "peers-detox-hard.png"
    assert image.read_bytes().startswith(b"\x89PNG")
    assert f"({image.name})" in text
    assert f"(generations/{file.name})" in text
    assert checksum(file) in text


def test_lexicon_and_classifier_judges() -> None:
    pytest.importorskip("vaderSentiment", reason="needs benchmarks/peers/requirements-judges.txt")
    good, neutral, bad = judges.sentiment(["What a lovely film!", "Go.", "An awful, dull film."])
    assert 1 >= good > neutral == 0.5 > bad >= 0
    pytest.importorskip("profanity_check", reason="needs benchmarks/peers/requirements-judges.txt")
    rude, kind = judges.toxicity(["You are a stupid idiot", "Thank you for the lovely day"])
    assert 1 >= rude > 0.5 > kind >= 0


def test_64_attributes_are_computed_from_one() -> None:
    needs = {one.method: one for one in serving_needs(SIZES, instruction_tokens=20, n=64)}
    assert set(needs) == set(FACTS)
    assert needs["foretrace"].memory == 100_000_000 + 64 * 500_000
    assert needs["DExperts"].memory == 64 * 20_000_000
    assert (needs["DExperts"].models, needs["DExperts"].passes) == (128, 3)
    assert needs["prompting"].memory == 64 * 20 * 46_080
