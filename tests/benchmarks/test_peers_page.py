"""Test the suites and the page that compare foretrace with other methods."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs the extra `transformers`")
pytest.importorskip("yaml", reason="needs the extra `evaluate`")
pytest.importorskip("matplotlib", reason="needs the extra `evaluate`")

from foretrace.evaluate.suite import MethodPlan, load_suite
from page_runner import PROJECT

sys.path.insert(0, str(PROJECT / "benchmarks"))

from peers.facts import FACTS
from peers.page import Made, write_page
from peers.sizes import Sizes, serving_needs

SUITES = ["detox-hard", "sentiment", "politics"]
SIZES = Sizes(
    lm=538_000_000,
    cached_token=46_080,
    hmm=100_000_000,
    attribute=500_000,
    vector=70_000,
    expert=10_000_000,
    anti_expert=10_000_000,
)


@pytest.mark.parametrize("name", SUITES)
def test_every_suite_has_every_method_as_a_curve(name: str) -> None:
    suite = load_suite(PROJECT / "benchmarks" / "peers" / f"{name}.yaml")
    assert (suite.continuations, suite.max_new_tokens) == (10, 20)
    curves: dict[str, list[MethodPlan]] = {}
    for method, plan in suite.methods.items():
        if method != "bare":
            assert plan.curve is not None
            curves.setdefault(plan.curve, []).append(plan)
    assert set(curves) == {*FACTS, "prompting + foretrace"}
    for curve in ("foretrace", "control vector", "DExperts", "self-debiasing"):
        assert len(curves[curve]) >= 3
    attribute = next(iter(suite.attributes))
    for plans in curves.values():
        for plan in plans:
            assert plan.options.get("attribute", attribute) == attribute
            assert plan.goals in ((), (attribute,))


def _figure(value: float) -> dict[str, Any]:
    return {"value": value, "low": value - 0.1, "high": value + 0.1, "dropped": 0}


def _method(curve: str | None, score: float, price: float | None) -> dict[str, Any]:
    figures = {"toxicity, average maximum": _figure(score), "perplexity": _figure(20 + score)}
    figures |= {"dist-3": _figure(0.8), "ended early": _figure(0.1)}
    if price is not None:
        figures["price"] = _figure(price)
    return {"plan": {"curve": curve}, "cost": 1.5, "figures": figures}


def results() -> Mapping[str, Any]:
    return {
        "lm": "my-lm",
        "hmm": {"states": 8},
        "prompts": 4,
        "sampling": {"continuations": 2, "max_new_tokens": 20, "top_p": 0.9, "seed": 0},
        "baseline": "bare",
        "methods": {
            "bare": _method(None, 0.7, 0.0),
            "foretrace, mild": _method("foretrace", 0.5, 0.02),
            "DExperts, 1": _method("DExperts", 0.4, 0.3),
            "fine-tuning": _method("fine-tuning", 0.6, None),
        },
        "at equal perplexity": [
            {"curve": "foretrace", "rival": "DExperts, 1", "difference": [0.1, -0.05, 0.2]},
            {"curve": "foretrace", "rival": "prompting", "difference": [-0.2, -0.3, -0.1]},
            {"curve": "foretrace", "rival": "fine-tuning", "difference": None},
            {"curve": "DExperts", "rival": "fine-tuning", "difference": [0.5, 0.4, 0.6]},
        ],
    }


def test_the_page_has_every_part(tmp_path: Path) -> None:
    made = [Made("control vector", "nontoxic", 61.2, 2000)]
    needs = serving_needs(SIZES, instruction_tokens=20)
    page = write_page(tmp_path, "COMMAND", {"detox-hard": results()}, made, SIZES, needs)
    text = page.read_text()
    assert "| fine-tuning | 0.6 [0.5, 0.7] | 20.6 [20.5, 20.7] |  |" in text
    assert "| DExperts, 1 | +0.100 [-0.050, +0.200] |" in text
    assert "+0.500" not in text
    assert "- foretrace is **within the interval of**: DExperts, 1." in text
    assert "- foretrace is **ahead of**: prompting." in text  # less toxic
    assert "- foretrace is **behind**" not in text
    assert "| fine-tuning | all of foretrace's points" in text
    assert "| control vector | nontoxic | 2,000 | 61.2 |" in text
    assert "- **GeDi**: " in text
    for against in ("perplexity", "price"):
        image = tmp_path / f"peers-detox-hard-{against}.png"
        assert image.read_bytes().startswith(b"\x89PNG")
        assert f"({image.name})" in text


def test_64_attributes_are_computed_from_one() -> None:
    needs = {one.method: one for one in serving_needs(SIZES, instruction_tokens=20, n=64)}
    assert set(needs) == set(FACTS)
    assert needs["foretrace"].memory == 100_000_000 + 64 * 500_000
    assert needs["DExperts"].memory == 64 * 20_000_000
    assert (needs["DExperts"].models, needs["DExperts"].passes) == (128, 3)
    assert needs["prompting"].memory == 64 * 20 * 46_080
