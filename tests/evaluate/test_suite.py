"""Test suites: those that come with foretrace, and user files."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from foretrace.errors import ForetraceError, InvalidFileError, InvalidInputError
from foretrace.evaluate.suite import AttributePlan, MethodPlan, Table, load_suite, suite_names

SUITE = """
prompts: {file: prompts.jsonl, text: prompt}
attributes:
  polite: {file: scored.jsonl, score: rudeness, invert: true, transform: [2, -1]}
methods:
  bare: {}
  steered: {goals: polite, strength: 2, horizon: 0}
judges:
  rude: {figures: [mean], source: "my_judge:score"}
"""


@pytest.mark.parametrize("name", suite_names())
def test_every_suite_loads(name: str) -> None:
    suite = load_suite(name)
    assert suite.name == name
    assert "bare" in suite.methods
    assert suite.judges


def test_documented_suites_exist() -> None:
    documented = {"detox", "detox-hard", "roles", "politics", "politics+detox", "sentiment"}
    assert documented <= set(suite_names())
    assert load_suite("detox-hard").methods == load_suite("detox").methods


def test_suite_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(SUITE)
    suite = load_suite(str(file))
    assert suite.name == "mine"
    assert list(suite.attributes["polite"].transform or ()) == [2, -1]
    steered = suite.methods["steered"]
    assert (steered.goals, steered.strength, steered.neutral_end) == (("polite",), (2.0,), True)
    assert load_suite(file) == suite


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (SUITE.replace("strength", "strenght"), "Did you mean strength?"),
        (SUITE.replace("  bare: {}\n", ""), "no method 'bare'"),
        (SUITE.replace("[mean]", "[median]"), "unknown figure median"),
        (SUITE.replace(', source: "my_judge:score"', ""), "exactly one of"),
        (SUITE.replace("text: prompt}", "text: prompt, x: 1}"), "'x' is not known"),
        (SUITE.replace("invert: true", "keep: women"), "a list of words, or `keep: groups`"),
        ("[1, 2]", "must be a mapping"),
        ("a: [", "not YAML"),
        (SUITE.replace("[mean]", "mean"), "are lists"),
        (SUITE.replace("strength: 2", "strength: two"), "A strength is a number"),
        (SUITE.replace("strength: 2", "transform: [1, 2, 3]"), "there are 1 goals"),
        (SUITE.replace("strength: 2", "strength: 2, level: mild"), "exclude each other"),
        (SUITE.replace("strength: 2", "strength: 2, transform: [1, 0]"), "exclude each other"),
        (SUITE.replace("strength: 2", "level: weak"), "unknown level 'weak'"),
        (SUITE.replace("strength: 2", "match_price: bare"), "cannot match the price of 'bare'"),
        (SUITE.replace("strength: 2", "match_price: steered"), "does not match another one"),
        (SUITE.replace("goals: polite, ", ""), "has strength, but no goals"),
        (SUITE.replace("goals: polite", "goals: [{of: polite}]"), "a goal is an expression"),
        (SUITE.replace("bare: {}", "bare: {options: {a: 1}}"), "options, but no plug-in"),
        (SUITE.replace("bare: {}", "bare: {plugin: 'a:b', options: 1}"), "must be a mapping"),
    ],
)
def test_errors_name_the_cause(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ForetraceError, match=expected.replace("?", r"\?")):
        load_suite(str(file))


def test_settings_of_several_goals(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"

    def method(settings: str) -> MethodPlan:
        file.write_text(SUITE.replace("goals: polite, strength: 2", f"goals: [a, ~b], {settings}"))
        return load_suite(file).methods["steered"]

    assert method("strength: 2").strength == (2.0, 2.0)
    assert method("strength: [2, 3]").strength == (2.0, 3.0)
    assert method("transform: [2, 3]").transform == ((2.0, 3.0), (2.0, 3.0))
    assert method("transform: [[2, 3], [1, 0]]").transform == ((2.0, 3.0), (1.0, 0.0))
    assert method("level: mild").used_level == "mild"
    assert method("neutral_end: false").used_level == "medium"
    assert method("strength: 2").used_level is None


def test_only_evidence_needs_samples_of_the_lm() -> None:
    plan = AttributePlan("texts.jsonl", score="high")
    assert plan.uses_samples
    assert replace(plan, objective="evidence").uses_samples
    for other in ({"objective": "cross-entropy"}, {"terms": 2}, {"by": "label"}, {"samples": 0}):
        assert not replace(plan, **other).uses_samples


def test_a_suite_cannot_extend_itself(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"extends: {file}\n")
    with pytest.raises(InvalidFileError, match="extends itself"):
        load_suite(str(file))


def test_unknown_suites_are_errors(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="Did you mean detox-hard"):
        load_suite("detox-hart")
    with pytest.raises(InvalidFileError, match="no file"):
        load_suite(str(tmp_path / "none.yaml"))


def test_rows_are_chosen_by_their_values(tmp_path: Path) -> None:
    rows = [
        {"text": f"t{n}" if n else " ", "role": f"r{n % 2}", "split": "test" if n % 3 else "train"}
        for n in range(20)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert len(Table("rows.jsonl").rows(tmp_path)) == 19  # without the blank row
    assert Table("rows.jsonl").rows(str(tmp_path)) == Table("rows.jsonl").rows(tmp_path)
    chosen = Table("rows.jsonl", where={"split": "test"}, at_most={"by": "role", "rows": 2})
    assert [row["text"] for row in chosen.rows(tmp_path)] == ["t1", "t2", "t4", "t5"]
    shares = [
        {row["text"] for row in Table("rows.jsonl", share=share).rows(tmp_path)}
        for share in ({"by": "text", "of": 2, "take": take} for take in (0, 1))
    ]
    assert len(shares[0] | shares[1]) == 19
    assert not shares[0] & shares[1]
    with pytest.raises(InvalidFileError, match="has no 'body'"):
        Table("rows.jsonl", "body").rows(tmp_path)
