"""The strengths of levels: what is steered toward at a level costs its budget, by the HMM."""

import logging
from dataclasses import replace
from statistics import fmean

import pytest
import torch

from foretrace.attribute import Attribute, ContextReward
from foretrace.attribute.terms import Terms
from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM
from foretrace.lookahead.levels import BUDGETS, TOLERANCE
from foretrace.lookahead.strengths import HMMPrices, LevelStrengths
from foretrace.steering import Compiler, Goal

VOCAB = 12
LEVELS = {"mild": 0.3, "medium": 0.6}
LETTERS = [bytes([97 + index]) for index in range(VOCAB)]
CONTAINS = Attribute.contains("ab", LETTERS)


@pytest.fixture(scope="module")
def hmm() -> HMM:
    return HMM.random(6, VOCAB, eos_token_id=0, seed=0)


def calibrated(attribute: Attribute, factor: float = 1.0) -> Attribute:
    levels = {name: factor * strength for name, strength in LEVELS.items()}
    return replace(attribute, config=replace(attribute.config, levels=levels))


def by_context(seed: int) -> Attribute:
    readers = torch.randn(1, 3, generator=torch.Generator().manual_seed(seed))
    context = ContextReward(readers, torch.ones(1, 2), "sha256:head")
    return Attribute(Terms.one(), context=context).renamed("moody")


POLITE = Attribute.from_weights(torch.linspace(0.5, 1.0, VOCAB), name="polite")
KIND = Attribute.from_rewards(torch.linspace(-1.0, 1.0, VOCAB) ** 3, name="kind")
CALM = Attribute.from_rewards(torch.linspace(0.0, 9.0, VOCAB).sin(), name="calm")
polite, kind, calm = calibrated(POLITE, 5.0), calibrated(KIND), calibrated(CALM, 1.5)


def strengths(hmm: HMM, attribute: Attribute, level: str = "medium") -> list[str]:
    """Return the names of the powers that the factors of an attribute become."""
    return [one.name for one in LevelStrengths(hmm).raised(attribute.factors, level)]


@pytest.mark.parametrize("attribute", [POLITE, KIND, KIND & POLITE & CONTAINS])
def test_the_price_is_the_divergence_at_texts_of_the_hmm(hmm: HMM, attribute: Attribute) -> None:
    """Constraints are left out, ends of text have no weight, and evidence has a limit."""
    prices, log_weights = HMMPrices(hmm), torch.zeros(VOCAB, dtype=torch.float64)
    log_weights[attribute.terms.tokens.long()] += attribute.terms.log_weights[0]
    for one in attribute.evidence:
        log_weights[one.tokens.long()] += one.rewards
    log_weights[0] = 0.0
    bare = prices.probability.double()
    assert torch.allclose(bare.sum(1), torch.ones(len(bare), dtype=torch.float64), atol=1e-5)
    for strength in (0.5, 1.0, 9.0):
        steered = (bare.log() + strength * log_weights).softmax(1)
        nats = (steered * (steered / bare).log()).nansum(1)
        expected = float(nats.clamp_max(1.0 if attribute.evidence else torch.inf).mean())
        assert prices.price(attribute, strength) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("attribute", [POLITE, KIND], ids=lambda one: one.name)
def test_an_attribute_without_levels_is_calibrated_with_the_hmm(
    attribute: Attribute, hmm: HMM, caplog: pytest.LogCaptureFixture
) -> None:
    """Once for each level, with a warning."""
    found = LevelStrengths(hmm)
    with caplog.at_level(logging.WARNING, "foretrace"):
        powers = [found.raised([attribute], level)[0] for level in (*BUDGETS, "mild")]
    for power, budget in zip(powers[:3], BUDGETS.values(), strict=True):
        assert HMMPrices(hmm).price(power) == pytest.approx(budget, rel=TOLERANCE)
    assert len(caplog.messages) == len(BUDGETS)
    assert f"'{attribute.name}' was not calibrated" in caplog.messages[0]


@pytest.mark.parametrize(
    ("attribute", "expected"),
    [
        (kind, ["kind ** 0.6"]),
        (polite, ["polite ** 3"]),
        (kind & ~CONTAINS, ["kind ** 0.6", f"~{CONTAINS.name}"]),
        (CONTAINS & kind, [CONTAINS.name, "kind ** 0.6"]),
        (CONTAINS, [CONTAINS.name]),
        (kind & ~kind, ["kind ** 0.6", None]),  # they cancel, and neither gets more for it
    ],
    ids=lambda one: getattr(one, "name", ""),
)
def test_a_calibrated_attribute_has_the_strength_of_its_level(
    attribute: Attribute, expected: list[str | None], hmm: HMM, caplog: pytest.LogCaptureFixture
) -> None:
    """Also beside constraints, which have no strength."""
    found = strengths(hmm, attribute)
    pairs = zip(found, expected, strict=True)
    assert all(name in (None, actual) for actual, name in pairs)
    assert len(caplog.messages) == attribute.name.count("~kind")  # it was not measured


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("attribute", "parts"),
    [
        (~kind, [kind]),
        (~calm & ~CONTAINS, [calm]),
        (kind & calm, [kind, calm]),
        (kind & kind, [kind, kind]),
        (polite & kind & CONTAINS, [polite, kind]),
        (calm & ~kind, [calm, kind]),
    ],
    ids=lambda one: getattr(one, "name", ""),
)
def test_a_composition_costs_as_much_as_one_of_its_parts(
    attribute: Attribute,
    parts: list[Attribute],
    level: str,
    hmm: HMM,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (merged, _), *rest = Compiler(hmm, 4).merge([Goal(attribute, level=level)])
    assert not rest
    prices = HMMPrices(hmm)
    expected = fmean(prices.price(part, part.config.levels[level]) for part in parts)
    assert prices.price(merged) == pytest.approx(expected, rel=2 * TOLERANCE)
    negated = [one for one in (KIND, CALM) if f"~{one.name}" in attribute.name]
    assert len(caplog.messages) == len(negated)
    assert all("was not measured, and may miss its budget" in one for one in caplog.messages)


def test_a_calibrated_negation_has_its_own_strength(
    hmm: HMM, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(kind.config, negation_levels={"medium": 0.2})
    measured = replace(kind, config=config)
    assert strengths(hmm, ~measured) == ["~kind ** 0.2"]
    assert strengths(hmm, ~~measured) == ["kind ** 0.6"]
    assert not caplog.messages
    assert strengths(hmm, ~measured, "mild") != ["~kind ** 0.3"]
    assert "'~kind' at 'mild' was not measured" in caplog.messages[0]


def test_the_hmm_does_not_price_context_rewards(hmm: HMM) -> None:
    moody, other = calibrated(by_context(0)), by_context(1)
    assert strengths(hmm, moody) == ["moody ** 0.6"]
    assert strengths(hmm, ~moody) == ["~moody ** 0.6"]
    assert strengths(hmm, kind & moody) == ["kind ** 0.424264", "moody ** 0.424264"]
    with pytest.raises(InvalidInputError, match=r"not calibrated.*does not know its price"):
        strengths(hmm, other)


def test_goals_at_a_level_share_its_budget(hmm: HMM) -> None:
    """In whatever order they come, as one goal or several. A strength is not changed."""
    compiler = Compiler(hmm, 4)
    both = [
        compiler.merge(goals)[0][0].evidence
        for goals in ([Goal(kind & calm)], [Goal(kind), Goal(calm)], [Goal(calm), Goal(kind)][::-1])
    ]
    for evidence in both[1:]:
        for one, other in zip(both[0], evidence, strict=True):
            assert torch.equal(one.rewards, other.rewards)
    apart = compiler.powers([Goal(kind, 2.0), Goal(calm)])
    assert [one.name for one in apart] == ["kind ** 2", "calm ** 0.9"]


def test_an_attribute_without_powers_says_that_it_has_no_levels(
    hmm: HMM, caplog: pytest.LogCaptureFixture
) -> None:
    found = LevelStrengths(hmm)
    for _ in range(2):
        assert found.raised([polite | POLITE], "strong")[0].name == "(polite | polite)"
    assert len(caplog.messages) == 1
    assert "costs the same at every level" in caplog.messages[0]


def test_an_unknown_level_is_refused(hmm: HMM) -> None:
    found, own = (
        LevelStrengths(hmm),
        replace(kind, config=replace(kind.config, levels={"huge": 9.0})),
    )
    assert found.raised([own, CONTAINS], "huge")[0].name == "kind ** 9"
    for attributes in ([kind], [CONTAINS], [own, calm]):
        with pytest.raises(InvalidInputError, match=r"no level 'huge'.*mild, medium, strong"):
            found.raised(attributes, "huge")
