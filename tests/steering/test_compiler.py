"""The compiler merges goals, finds strengths, and keeps tables within a budget."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from foretrace.attribute import Attribute, LogitAffine
from foretrace.errors import InvalidInputError, TokenizerMismatchError
from foretrace.hmm import HMM, HMMConfig
from foretrace.lookahead.lookahead import Lookahead
from foretrace.steering import CompiledGoal, Compiler, Goal, Marker, Request
from tiny import tiny_hmm
from tiny_attributes import SPELLED, attributes

VOCAB = 12
LETTERS = [bytes([97 + index]) for index in range(VOCAB)]
B = Marker("b", SPELLED)


@pytest.fixture(scope="module")
def hmm() -> HMM:
    return HMM.random(6, VOCAB, eos_token_id=0, seed=0)


def product(**levels: float) -> Attribute:
    made = Attribute.from_weights(torch.linspace(0.5, 1.0, VOCAB), name="polite")
    return replace(made, config=replace(made.config, levels=levels))


def rewards() -> Attribute:
    return Attribute.from_rewards(torch.linspace(-1.0, 1.0, VOCAB), name="kind")


def names(goal: CompiledGoal) -> list[str]:
    lookaheads = [factor.lookahead for factor in goal.factors]
    return [one.attribute.name for one in lookaheads if isinstance(one, Lookahead)]


def test_a_goal_is_a_plain_record(hmm: HMM) -> None:
    """Making it builds nothing, and changing one field changes nothing else."""
    goal = Goal(product(medium=3.0), 2.0)
    longer = replace(replace(goal, window=8), window=9)
    assert longer == Goal(goal.attribute, 2.0, window=9)
    assert names(Compiler(hmm, 4).compile(longer)) == ["polite ** 2"]


def test_goals_without_a_transform_are_one_product() -> None:
    hmm, known = tiny_hmm("dense"), attributes()
    compiler = Compiler(hmm, 4)
    one, two = Goal(known["one"], 2.0, neutral_end=False), Goal(known["and"], 3.0)
    transformed = Goal(known["not"], transform=LogitAffine(2.0, -1.0))
    merged = compiler.compile([transformed, one, two])
    assert len(merged.factors) == 2
    assert merged.factors[1].transform == transformed.transform
    assert names(merged)[0].count("**") == 2
    assert merged.neutral_end
    assert not compiler.compile(one).neutral_end
    with pytest.raises(InvalidInputError, match="combines evidence with a sum"):
        compiler.compile([Goal(Attribute.from_rewards([1.0, 0, 0, 0]), 1.0), Goal(known["not"])])
    with pytest.raises(InvalidInputError, match="There is no goal"):
        compiler.compile([])


def test_equal_goals_are_compiled_once(hmm: HMM) -> None:
    compiler = Compiler(hmm, 4)
    first, again = (compiler.compile(Goal(product(), 2.0)) for _ in range(2))
    assert first.factors[0].lookahead is again.factors[0].lookahead
    other = compiler.compile(Goal(product(), 3.0))
    assert other.factors[0].lookahead is not first.factors[0].lookahead
    marked = [compiler.compile(Goal(product(), 2.0, after=Marker("b", LETTERS))) for _ in range(2)]
    assert marked[0].window.after is marked[1].window.after


def test_the_compiler_keeps_what_was_used_last_within_its_budget(hmm: HMM) -> None:
    size = Compiler(hmm, 4).compile(Goal(product(), 2.0)).factors[0].lookahead
    assert isinstance(size, Lookahead)
    compiler = Compiler(hmm, 4, memory=3 * size.nbytes)
    made = [compiler.compile(Goal(product(), 1.0 + k)).factors[0].lookahead for k in range(9)]
    assert compiler.nbytes == 3 * size.nbytes
    assert compiler.compile(Goal(product(), 9.0)).factors[0].lookahead is made[-1]
    assert compiler.compile(Goal(product(), 1.0)).factors[0].lookahead is not made[0]


def test_goals_of_one_text_have_one_window() -> None:
    hmm, one = tiny_hmm("dense"), attributes()["one"]
    compiler = Compiler(hmm, 4)
    same = [Goal(one, 1.0, after=Marker("b", SPELLED), window=3) for _ in range(2)]
    assert compiler.compile(same).window.length == 3
    with pytest.raises(InvalidInputError, match="the same `after` and the same `window`"):
        compiler.compile([same[0], Goal(one, 1.0, after=B, window=4)])


def test_constraints_that_cannot_be_met_are_refused() -> None:
    hmm, known = tiny_hmm("dense"), attributes()
    compiler = Compiler(hmm, 8)
    transform = LogitAffine(2.0, 0.0)
    with pytest.raises(InvalidInputError, match="Join them by &"):
        compiler.compile([Goal(known["must"]), Goal(known["must not"], transform=transform)])
    for name, refused in (("must", True), ("either", True), ("must not", False), ("one", False)):
        goal = Goal(known[name], 1.0, window=Marker("c", SPELLED))
        if refused:
            with pytest.raises(InvalidInputError, match="the marker may come before the text"):
                compiler.compile(goal)
        else:
            compiler.compile(goal)
    long = compiler.compile(Goal(Attribute.contains("abbab", SPELLED)))
    Request(long, (), 3)  # ab, b, ab
    with pytest.raises(InvalidInputError, match="take 3 tokens at least"):
        Request(long, (), 2)


def test_a_marker_of_another_tokenizer_is_refused() -> None:
    model = tiny_hmm("dense")
    config = HMMConfig(tokenizer_fingerprint="this")
    hmm = HMM(model.initial, model.transition, model.emission, config)
    with pytest.raises(TokenizerMismatchError, match="The marker 'b'"):
        Compiler(hmm, 4).compile(Goal(attributes()["one"], 1.0, after=Marker("b", SPELLED, "that")))


def test_what_is_no_goal_is_refused() -> None:
    one: Any = attributes()["one"]
    with pytest.raises(InvalidInputError, match="needs an Attribute, but got str"):
        Goal("nontoxic")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="above 0"):
        Goal(one, -1.0)
    with pytest.raises(InvalidInputError, match="the EAP of rewards"):
        Goal(rewards(), transform=LogitAffine(2.0, 0.0))
    with pytest.raises(InvalidInputError, match=r"foretrace.marker\('</think>', tokenizer\)"):
        Goal(one, 1.0, after="</think>")  # type: ignore[arg-type]
    for window in (0, -1, True, 2.5, "c"):
        with pytest.raises(InvalidInputError, match="marker"):
            Goal(one, 1.0, window=window)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="must be a marker"):
        Goal(one, 1.0, after=64)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="sum of 2 products"):
        Compiler(tiny_hmm("dense"), 4).compile(Goal(~one, 2.0))
