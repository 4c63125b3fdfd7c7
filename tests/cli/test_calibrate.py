"""`foretrace calibrate`."""

import shutil
from pathlib import Path

import pytest
import torch

from foretrace.attribute import Attribute, AttributeStore
from foretrace.lookahead.levels import BUDGETS
from forked import Run

pytest.importorskip("transformers", reason="needs the extra `transformers`")


@pytest.fixture
def options(steered: list[str], tmp_path: Path) -> list[str]:
    """The options of a copy of the attributes, which the command changes."""
    folder = shutil.copytree(steered[4], tmp_path / "attributes")
    return [*steered[:3], "--attributes", str(folder)]


def test_levels_are_written_into_the_file(run: Run, options: list[str]) -> None:
    store = AttributeStore(options[4])
    before = store["odd"]
    attribute = ["--attribute", "odd", "--budget", "strong=0.3"]
    done = run("calibrate", *options, *attribute)
    assert done.code == 0, done.err
    after = store["odd"]
    assert torch.equal(after.terms.log_weights, before.terms.log_weights)
    assert after.name == before.name
    assert list(after.config.levels) == list(BUDGETS)
    strengths = list(after.config.levels.values())
    assert strengths == sorted(strengths)
    record = after.config.fit["calibration"]
    assert record["model"] == options[0]
    for name, budget in {**BUDGETS, "strong": 0.3}.items():
        level = record["levels"][name]
        assert level["budget"] == budget
        assert level["price"] == pytest.approx(budget, rel=0.16)
        assert level["strength"] == after.config.levels[name]
        assert f"{level['strength']:.3g}" in done.out
    assert "nats per token" in done.out
    assert after.report is not None
    assert len(after.report.levels[-1].pairs) == 3
    shown = run("attribute", "show", store.path("odd"))
    for text in (after.report.verdict, after.report.judge, *after.report.levels[-1].pairs[0]):
        assert text.strip() in done.out
        assert text.strip() in shown.out
    assert len(list(Path(options[4]).iterdir())) == 3


def test_an_attribute_file_and_prompts(run: Run, options: list[str], tmp_path: Path) -> None:
    file = tmp_path / "rewards.safetensors"
    Attribute.from_rewards(torch.linspace(-1, 1, 64), name="rewards").save(file)
    (tmp_path / "prompts.txt").write_text("w1\nw2 w3 w4\n\nw5\n")
    more = ["--prompts", tmp_path / "prompts.txt", "--max-new-tokens", 8]
    assert run("calibrate", *options[:3], "--attribute", file, *more).code == 0
    config = Attribute.load(file).config
    assert config.levels["mild"] < config.levels["medium"] < config.levels["strong"]
    record = config.fit["calibration"]
    assert record["rows"] == 33  # 11 continuations of each of three prompts
    assert record["prompts"] == f"{tmp_path / 'prompts.txt'}"


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["--attribute", "od"], 1, "Did you mean odd?"),
        (["--attribute", "always"], 1, "no strength to calibrate"),
        (["--attribute", "odd", "--budget", "medium=0"], 2, "LEVEL=NATS"),
        (["--attribute", "odd", "--budget", "huge=1"], 2, "LEVEL=NATS"),
    ],
)
def test_errors_are_one_line(
    run: Run, options: list[str], arguments: list[str], code: int, expected: str
) -> None:
    done = run("calibrate", *options, *arguments)
    assert done.code == code
    assert expected in done.err
    assert not AttributeStore(options[4])["odd"].config.levels
