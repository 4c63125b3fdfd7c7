"""Explanations: they tell what steering does, exactly."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `transformers`")

from transformers import AutoModelForCausalLM

from foretrace.attribute import Attribute, ContextReward, LogitAffine
from foretrace.context import Head, Probe
from foretrace.engines.transformers import SteeringProcessor
from foretrace.engines.transformers.explain import explain
from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM
from foretrace.lookahead import Lookahead
from foretrace.steering import Compiler, Goal
from tiny_lm import WORDS

VOCAB = len(WORDS)
PROMPT, WRITTEN, LIMIT = [3, 4], [5, 6, 7], 6


@pytest.fixture(scope="module")
def goals() -> list[Goal]:
    weights = torch.rand(2, VOCAB, generator=torch.Generator().manual_seed(0))
    one, two = map(Attribute.from_weights, weights)
    return [
        Goal(one, transform=LogitAffine(3.0, -1.0), neutral_end=False),
        Goal(~two, neutral_end=False),
    ]


@pytest.fixture(scope="module")
def hmm() -> HMM:
    return HMM.random(8, VOCAB, eos_token_id=0, seed=0)


@pytest.fixture(scope="module")
def compiler(hmm: HMM) -> Compiler:
    return Compiler(hmm, 8)


@pytest.mark.shows("transformers generate", "explain")
def test_it_tells_what_the_processor_does(
    tiny_lm: Path, goals: list[Goal], compiler: Compiler
) -> None:
    lm: Any = AutoModelForCausalLM.from_pretrained(tiny_lm, dtype=torch.float32)
    settings: dict[str, Any] = {"max_new_tokens": LIMIT, "candidates": VOCAB}
    choices = explain(lm, PROMPT, WRITTEN, goals, compiler, **settings)
    mask = torch.ones(1, len(PROMPT))
    goal = compiler.compile(goals)
    processor = SteeringProcessor(goal, prompt_mask=mask, max_new_tokens=LIMIT)
    for place, choice in enumerate(choices):
        ids = torch.tensor([[*PROMPT, *WRITTEN[:place]]])
        with torch.inference_mode():
            logits = lm(ids).logits[:, -1]
        steered = processor(ids, logits).softmax(-1)[0]
        lm_says = logits.softmax(-1)[0]
        assert choice.written.token == WRITTEN[place]
        assert [each.token for each in choice.candidates] == steered.argsort(
            descending=True
        ).tolist()
        for each in choice.candidates:
            assert each.steered == pytest.approx(float(steered[each.token]), abs=1e-6)
            assert each.lm == pytest.approx(float(lm_says[each.token]), abs=1e-6)
        means = [
            sum(each.lm * each.eap[goal] for each in choice.candidates)
            for goal in range(len(goals))
        ]
        assert choice.expected == pytest.approx(means, abs=1e-5)
        ratios = (steered / lm_says).log()
        assert choice.price == pytest.approx(float((steered * ratios).sum()), abs=1e-5)


def test_after_the_prompt_it_is_the_lookaheads_own(
    tiny_lm: Path, goals: list[Goal], compiler: Compiler
) -> None:
    lm: Any = AutoModelForCausalLM.from_pretrained(tiny_lm, dtype=torch.float32)
    (choice, *_) = explain(lm, PROMPT, WRITTEN, goals, compiler, max_new_tokens=LIMIT)
    lookaheads = [Lookahead(compiler.hmm, goal.attribute, 8) for goal in goals]
    eaps = [one.eap(torch.tensor(PROMPT), LIMIT - 1) for one in lookaheads]
    for each in choice.candidates:
        assert each.eap == pytest.approx([float(eap[each.token]) for eap in eaps], abs=1e-6)


@pytest.mark.parametrize("once", [False, True])
def test_evidence_is_shown_relative_to_its_mean(
    tiny_lm: Path, once: bool, compiler: Compiler
) -> None:
    lm: Any = AutoModelForCausalLM.from_pretrained(tiny_lm, dtype=torch.float32)
    rewards = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0))
    goal = Goal(Attribute.from_rewards(rewards, first_only=once), 9.0)
    settings: dict[str, Any] = {"max_new_tokens": LIMIT, "candidates": VOCAB}
    choices = explain(lm, PROMPT, WRITTEN, [goal], compiler, **settings)
    first, *_, last = choices
    exact = Lookahead(compiler.hmm.to(dtype=torch.float64), goal.attribute**9.0, 8)
    eap = exact.eap(torch.tensor(PROMPT), LIMIT - 1)
    mean = sum(each.lm * float(eap[each.token]) for each in first.candidates)
    for each in first.candidates:
        assert each.eap == pytest.approx([float(eap[each.token]) / mean], rel=1e-3)
    for choice in choices:
        assert choice.expected == pytest.approx([1.0], abs=1e-4)
    assert (last.price <= 2.01) == once  # rewards that count once have a largest price


def test_several_goals_are_explained_as_one_product(tiny_lm: Path, compiler: Compiler) -> None:
    lm: Any = AutoModelForCausalLM.from_pretrained(tiny_lm, dtype=torch.float32)
    weights = torch.rand(2, VOCAB, generator=torch.Generator().manual_seed(0))
    one, two = (Attribute.from_weights(row) for row in weights)
    (both, *_) = explain(lm, PROMPT, WRITTEN, [Goal(one, 2.0), Goal(two, 3.0)], compiler)
    merged = Goal(one**2.0 & two**3.0, 1.0)
    (product, *_) = explain(lm, PROMPT, WRITTEN, [merged], compiler)
    for each, same in zip(both.candidates, product.candidates, strict=True):
        assert each.steered == pytest.approx(same.steered, abs=1e-6)
    assert len(both.expected) == 2


@pytest.mark.parametrize("prompt", [PROMPT, [*PROMPT, 9]])
def test_required_text_adds_up(tiny_lm: Path, hmm: HMM, prompt: list[int]) -> None:
    """Steering uses a power of its probability, which depends on the prompt."""
    lm: Any = AutoModelForCausalLM.from_pretrained(tiny_lm, dtype=torch.float32)
    spelled = [f" {token} ".encode() for token in range(VOCAB)]
    goal = Goal(Attribute.contains(" 9 ", spelled), neutral_end=False)
    settings: dict[str, Any] = {"max_new_tokens": LIMIT, "candidates": VOCAB}
    (choice, *_) = explain(lm, prompt, WRITTEN, [goal], Compiler(hmm, 8), **settings)
    known = [each for each in choice.candidates if each.token != 0]
    changes = torch.tensor([each.steered / each.lm for each in known]).log()
    added = torch.tensor([each.word + each.lookahead for each in known])
    torch.testing.assert_close(changes - changes[0], added - added[0], atol=2e-3, rtol=1e-3)
    exact = Compiler(hmm, 8, exact=True)
    (same, *_) = explain(lm, prompt, WRITTEN, [goal], exact, **settings)
    for each in same.candidates:
        (found,) = (one for one in choice.candidates if one.token == each.token)
        assert found.eap == pytest.approx(each.eap, rel=1e-5)
        assert each.token == 9 or found.lookahead != pytest.approx(each.lookahead, abs=1e-3)


@pytest.mark.parametrize("window", [None, 2])
def test_words_lookahead_and_context_add_up(tiny_lm: Path, hmm: HMM, window: int | None) -> None:
    """To the change of the logits, which no limit of the price has reduced here."""
    lm: Any = AutoModelForCausalLM.from_pretrained(tiny_lm, dtype=torch.float32)
    probe = Probe.build(Head.of_model(lm))
    rewards = 0.3 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(0))
    parts = torch.randn(2, 2, 33, generator=torch.Generator().manual_seed(1))
    context = ContextReward(parts[0], 0.02 * parts[1, :, 1:], probe.config.fingerprint)
    kind = Attribute.from_rewards(rewards, first_only=False)
    weighed = Attribute.from_weights(torch.linspace(0.5, 1.0, VOCAB))
    options: dict[str, Any] = {"neutral_end": False, "window": window}
    goals = [Goal(kind.with_context(context), 1.0, **options)]
    goals += [Goal(weighed, transform=LogitAffine(1.5, 0.5), **options)]
    settings: dict[str, Any] = {"max_new_tokens": LIMIT, "candidates": VOCAB}
    choices = explain(lm, PROMPT, WRITTEN, goals, Compiler(hmm, 8, probe), **settings)
    assert min(choice.price for choice in choices) == 0.0 or window is None
    for choice in choices:
        known = [each for each in choice.candidates if each.token != 0]
        changes = torch.tensor([each.steered / each.lm for each in known]).log()
        added = torch.tensor([each.word + each.lookahead + each.context for each in known])
        torch.testing.assert_close(changes - changes[0], added - added[0], atol=2e-3, rtol=1e-3)
    first = choices[0].candidates
    for part in ("word", "lookahead", "context"):
        values = [getattr(each, part) for each in first]
        assert max(values) - min(values) > 0.01
        mean = sum(each.lm * value for each, value in zip(first, values, strict=True))
        assert mean == pytest.approx(0.0, abs=1e-4)
    bare = kind.with_context(None)
    (alone, *_) = explain(lm, PROMPT, WRITTEN, [Goal(bare, 2.0)], Compiler(hmm, 0), **settings)
    by_token = {each.token: each for each in alone.candidates}
    assert {each.lookahead for each in alone.candidates} == {0.0}
    assert by_token[5].word - by_token[6].word == pytest.approx(
        2 * float(rewards[5] - rewards[6]), abs=1e-4
    )


def test_nothing_to_explain_is_refused(goals: list[Goal], compiler: Compiler) -> None:
    with pytest.raises(InvalidInputError, match="needs a prompt"):
        explain(None, PROMPT, [], goals, compiler)  # type: ignore[arg-type]
