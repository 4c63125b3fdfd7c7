"""Strength inside the lookahead: texts have probability p(x) exp(k * rewards) / Z."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor

from foretrace.attribute import Attribute, LogitAffine
from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM
from foretrace.lookahead import Lookahead
from foretrace.steering import Goal, PrefixTracker, Request
from foretrace.steering.merge_goals import merge_goals
from steering.test_batch import sampled_counts, steered_log_probabilities
from tiny import TOKENS, all_texts, tiny_hmm
from tiny_attributes import attributes

LENGTH = 4
REWARDS = [0.7, -0.4, 0.0, -1.1]
VALUES = torch.tensor(REWARDS, dtype=torch.float64)
NO_ENDS = torch.tensor([], dtype=torch.long)
SPELLED = [b"a", b"b", b"c", b"ab"]


def evidence(once: bool = False) -> Attribute:
    return Attribute.from_rewards(REWARDS, bias=0.3, first_only=once, name="evidence")


def rewards_of(texts: Tensor, rewards: Tensor, ends: Tensor) -> Tensor:
    """Return the sum of rewards of each text; end-of-text tokens have none: (n, T) -> (n,)."""
    return torch.where(torch.isin(texts, ends), 0.0, rewards.double()[texts]).sum(1)


def check_exact(hmm: HMM, goals: tuple[Goal, ...], log_weights: Tensor) -> None:
    """Compare steered probabilities with p(x) exp(log_weights(x)) / Z."""
    log_likelihood = hmm.log_likelihood(all_texts(LENGTH))
    joint = torch.where(log_likelihood > -60, (log_likelihood + log_weights).exp(), 0.0)
    probabilities = steered_log_probabilities(hmm, goals).exp()
    probabilities = torch.where(joint > 0, probabilities, 0.0)
    torch.testing.assert_close(probabilities, joint / joint.sum(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("strength", [0.5, 1.0, 4.0, 10.0])
@pytest.mark.parametrize("form", ["dense", "sparse", "eos", "two ends"])
def test_rewards_of_both_signs_are_exact(form: str, strength: float) -> None:
    hmm, texts = tiny_hmm(form), all_texts(LENGTH)
    goal = Goal(Lookahead(hmm, evidence(), LENGTH), strength, neutral_end=False)
    ends = torch.tensor(hmm.config.eos_token_ids, dtype=torch.long)
    check_exact(hmm, (goal,), strength * rewards_of(texts, VALUES, ends))


@pytest.mark.parametrize("strength", [0.5, 1.0, 4.0, 10.0])
@pytest.mark.parametrize("form", ["dense", "sparse", "eos", "two ends"])
def test_powers_of_a_product_are_exact(form: str, strength: float) -> None:
    hmm, texts, attribute = tiny_hmm(form), all_texts(LENGTH), attributes()["one"]
    goal = Goal(Lookahead(hmm, attribute, LENGTH), strength, neutral_end=False)
    ends = torch.tensor(hmm.config.eos_token_ids, dtype=torch.long)
    probability = attribute.probability(texts, ~torch.isin(texts, ends))
    check_exact(hmm, (goal,), strength * probability.log())


@pytest.mark.parametrize("form", ["dense", "eos"])
def test_conjunctions_with_constraints_and_products_are_exact(form: str) -> None:
    hmm, texts = tiny_hmm(form), all_texts(LENGTH)
    product, required = attributes()["one"], Attribute.contains("ba", SPELLED)
    attribute = evidence() ** 4 & ~(evidence() ** 0.5) & product**2 & required
    goal = Goal(Lookahead(hmm, attribute, LENGTH), 1.0, neutral_end=False)
    ends = torch.tensor(hmm.config.eos_token_ids, dtype=torch.long)
    mask = ~torch.isin(texts, ends)
    log_weights = 3.5 * rewards_of(texts, VALUES, ends)
    log_weights += 2 * product.probability(texts, mask).log()
    check_exact(hmm, (goal,), log_weights + required.probability(texts, mask).log())


def test_rewards_beyond_the_range_of_exponentials_combine_with_constraints() -> None:
    hmm = tiny_hmm("dense")
    attribute = Attribute.from_rewards([8.0, -8.0, 0.0, 1.0]) ** 200
    lookahead = Lookahead(hmm, attribute & Attribute.contains("ba", SPELLED), LENGTH)
    assert bool(lookahead.tables.values.isfinite().all())
    assert float(lookahead.tables.log_scales.max()) > 3000


@pytest.mark.parametrize("form", ["dense", "sparse", "eos"])
def test_merged_goals_with_different_strengths_are_exact(form: str) -> None:
    hmm, texts = tiny_hmm(form), all_texts(LENGTH)
    product, others = attributes()["one"], torch.tensor([-0.2, 0.9, 0.3, 0.0], dtype=torch.float64)
    second = Attribute.from_rewards(others, first_only=False)
    goals = [
        Goal(Lookahead(hmm, evidence(), 2), 3.0, neutral_end=False),
        Goal(Lookahead(hmm, second, LENGTH), 0.5, neutral_end=False),
        Goal(Lookahead(hmm, product, 1), 4.0, neutral_end=False),
    ]
    (merged,) = merge_goals(goals)
    assert (merged.lookahead.horizon, merged.neutral_end) == (LENGTH, False)
    ends = torch.tensor(hmm.config.eos_token_ids, dtype=torch.long)
    log_weights = 3.0 * rewards_of(texts, VALUES, ends) + 0.5 * rewards_of(texts, others, ends)
    log_weights += 4.0 * product.probability(texts, ~torch.isin(texts, ends)).log()
    check_exact(hmm, (merged,), log_weights)


def test_goals_are_merged_once_for_each_combination() -> None:
    hmm = tiny_hmm("dense")
    one, two = (Lookahead(hmm, attributes()[name], 4) for name in ("one", "and"))
    goals = [Goal(one, 2.0), Goal(two, 1.0, neutral_end=False)]
    (merged,), (again,) = merge_goals(goals), merge_goals([Goal(one, 2.0), goals[1]])
    assert merged.neutral_end
    assert merged.lookahead is again.lookahead
    assert merge_goals(goals[::-1])[0].lookahead is not merged.lookahead
    assert merge_goals(goals[:1]) == (goals[0],)
    assert merge_goals([]) == ()


def test_goals_with_a_transform_are_not_merged() -> None:
    hmm = tiny_hmm("dense")
    one, two = (Lookahead(hmm, attributes()[name], 4) for name in ("one", "not"))
    transformed = Goal(two, transform=LogitAffine(2.0, -1.0))
    assert merge_goals([transformed, Goal(one, 1.0)])[0] is transformed
    merged, last = merge_goals([transformed, Goal(one, 2.0), Goal(one, 3.0)])
    assert last is transformed
    assert merged.transform.is_identity


def test_evidence_and_a_sum_of_products_are_not_merged() -> None:
    hmm = tiny_hmm("dense")
    goals = [Goal(Lookahead(hmm, x, 4), 1.0) for x in (evidence(), attributes()["not"])]
    with pytest.raises(InvalidInputError, match="combines evidence with a sum"):
        merge_goals(goals)


def test_sampled_texts_follow_the_rewards() -> None:
    hmm, texts, count = tiny_hmm("dense"), all_texts(LENGTH), 20_000
    goal = Goal(Lookahead(hmm, evidence(), LENGTH), 2.0, neutral_end=False)
    log_weights = 2 * rewards_of(texts, VALUES, torch.tensor([], dtype=torch.long))
    joint = (hmm.log_likelihood(texts) + log_weights).exp()
    counts = sampled_counts(hmm, goal, count)
    assert chisquare(counts, count * joint / joint.sum()).pvalue > 1e-3


@given(
    seed=st.integers(0, 2**31),
    rewards=st.lists(st.floats(-50, 50), min_size=TOKENS, max_size=TOKENS),
)
def test_float32_agrees_with_float64_for_large_rewards_and_long_texts(
    seed: int, rewards: list[float]
) -> None:
    exact = tiny_hmm("dense")
    narrow = exact.to(dtype=torch.float32)
    attribute = Attribute.from_rewards(torch.tensor(rewards, dtype=torch.float64), first_only=False)
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(0, TOKENS, (399,), generator=generator).tolist()
    logits = torch.randn(1, TOKENS, generator=generator)
    steered = []
    for hmm in (exact, narrow):
        request = Request((Goal(Lookahead(hmm, attribute, 400), 1.0, neutral_end=False),), (), 400)
        for length in (0, 200, 399):
            tracker = PrefixTracker(hmm)
            tracker.step([request], [text[:length]])
            bare = logits.to(hmm.initial)
            steered.append(tracker.reweight(bare).log_softmax(-1).double())
    for wide, single in zip(steered[:3], steered[3:], strict=True):
        assert bool(single.isfinite().all())
        torch.testing.assert_close(single.exp(), wide.exp(), rtol=1e-5, atol=1e-5)


def test_a_reward_counts_once_per_text() -> None:
    hmm = tiny_hmm("dense")
    logits, steered = torch.randn(1, TOKENS, dtype=torch.float64), []
    for once in (False, True):
        goal = Goal(Lookahead(hmm, evidence(once), 6), 1.0, neutral_end=False)
        tracker = PrefixTracker(hmm)
        tracker.step([Request((goal,), (1,), 8)], [[0, 3, 0]])
        steered.append(tracker.reweight(logits))
    taken_back = torch.tensor([[REWARDS[0], 0.0, 0.0, REWARDS[3]]], dtype=torch.float64)
    torch.testing.assert_close(steered[1], steered[0] - taken_back)


def test_states_of_generated_tokens_agree_however_they_are_computed() -> None:
    hmm = tiny_hmm("dense")
    request = Request((Goal(Lookahead(hmm, evidence(once=True), 6)),), (1,), 8)
    stepped, read = PrefixTracker(hmm), PrefixTracker(hmm)
    for tokens in ([], [0], [0, 2], [0, 2, 0]):
        stepped.step([request], [tokens])
    read.step([request], [[0, 2, 0]])
    logits = torch.randn(1, TOKENS, dtype=torch.float64)
    torch.testing.assert_close(stepped.reweight(logits), read.reweight(logits))


def test_a_step_costs_no_more_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    hmm = tiny_hmm("dense")
    goal = Goal(Lookahead(hmm, evidence(once=True), 6), 20.0)
    logits = torch.randn(3, TOKENS, dtype=torch.float64)
    spent: list[Tensor] = []
    for limit in (0.1, 100.0):
        monkeypatch.setattr("foretrace.steering.request.MAX_REWARD_PRICE", limit)
        tracker = PrefixTracker(hmm)
        tracker.steering.observe = lambda prices, _: spent.append(prices)
        tracker.step([Request((goal,), (1,), 8)] * 3, [[], [2], [0]])
        tracker.reweight(logits)
    limited, free = spent
    assert bool((limited <= 0.1 + 1e-3).all())
    assert bool((free > 0.1).any())
    assert bool((limited[free > 0.1] > 0.09).all())


def test_strength_needs_a_product_or_evidence() -> None:
    hmm = tiny_hmm("dense")
    with pytest.raises(InvalidInputError, match="sum of 2 products"):
        Goal(Lookahead(hmm, ~attributes()["one"], 4), 2.0)
    with pytest.raises(InvalidInputError, match="above 0"):
        Goal(Lookahead(hmm, attributes()["one"], 4), -1.0)
    with pytest.raises(InvalidInputError, match="evidence"):
        Goal(Lookahead(hmm, evidence(), 4), transform=LogitAffine(2.0, 0.0))
    with pytest.raises(InvalidInputError, match="evidence"):
        evidence() | attributes()["one"]
    with pytest.raises(InvalidInputError, match="single products"):
        Lookahead(hmm, evidence() & ~attributes()["one"], 4)
