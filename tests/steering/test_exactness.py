"""Steering an LM that is the HMM gives every text its exact posterior probability."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor

from foretrace.attribute import Attribute
from foretrace.engines.prefix_tracker import PrefixTracker
from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM
from foretrace.steering import CompiledGoal, Compiler, Goal, Marker, Request
from goals import compiled, reweighted, steer
from tiny import TOKENS, all_texts, tiny_hmm
from tiny_attributes import SPELLED, attributes

LENGTH = 4
REWARDS = torch.tensor([0.7, -0.4, 0.0, -1.1], dtype=torch.float64)
B, BA = (Marker(text, SPELLED) for text in ("b", "ba"))


def evidence(first_only: bool = False) -> Attribute:
    return Attribute.from_rewards(REWARDS, bias=0.3, first_only=first_only, name="evidence")


def next_token_logits(hmm: HMM, texts: Tensor) -> Tensor:
    """Return the logits of a language model that is the HMM: log p(next token | text), (n, V)."""
    if texts.shape[1] == 0:
        return hmm.emission.predict(hmm.initial.expand(len(texts), -1)).log()
    return hmm.emission.predict(hmm.filter(texts).predicted[:, -1]).log()


def steered_probabilities(hmm: HMM, goal: CompiledGoal) -> Tensor:
    """Return the probability of every text of LENGTH tokens, of an LM that is the HMM."""
    request, tracker = Request(goal, (), LENGTH), PrefixTracker(hmm)
    total = torch.zeros(TOKENS**LENGTH, dtype=torch.float64)
    for length in range(LENGTH):
        prefixes = torch.tensor(list(itertools.product(range(TOKENS), repeat=length))).long()
        prefixes = prefixes.reshape(TOKENS**length, length)
        tracker.step([request] * len(prefixes), prefixes.tolist())
        steered = reweighted(tracker, next_token_logits(hmm, prefixes)).log_softmax(-1)
        total += steered.flatten().repeat_interleave(TOKENS ** (LENGTH - length - 1))
    return total.exp()


def check(hmm: HMM, goal: CompiledGoal, log_weights: Tensor) -> None:
    """Compare steered probabilities with p(x) exp(log_weights(x)) / Z."""
    log_likelihood = hmm.log_likelihood(all_texts(LENGTH))
    joint = torch.where(log_likelihood > -60, (log_likelihood + log_weights).exp(), 0.0)
    steered = torch.where(joint > 0, steered_probabilities(hmm, goal), 0.0)
    torch.testing.assert_close(steered, joint / joint.sum(), rtol=1e-9, atol=1e-12)


def counted(hmm: HMM) -> Tensor:
    """Return which tokens of all texts are no end of text."""
    ends = torch.tensor(hmm.config.eos_token_ids, dtype=torch.long)
    return ~torch.isin(all_texts(LENGTH), ends)


def rewards_of(hmm: HMM, rewards: Tensor = REWARDS) -> Tensor:
    """Return the sum of rewards of each text; end-of-text tokens have none."""
    return torch.where(counted(hmm), rewards.double()[all_texts(LENGTH)], 0.0).sum(1)


@pytest.mark.parametrize("name", attributes())
@pytest.mark.parametrize("form", ["dense", "sparse", "eos"])
def test_an_attribute_is_conditioned_on(form: str, name: str) -> None:
    hmm, attribute = tiny_hmm(form), attributes()[name]
    goal = compiled(hmm, attribute, LENGTH, neutral_end=False)
    check(hmm, goal, attribute.probability(all_texts(LENGTH), counted(hmm)).log())


@pytest.mark.parametrize("strength", [0.5, 1.0, 10.0])
@pytest.mark.parametrize("form", ["dense", "sparse", "eos", "two ends"])
def test_strengths_are_powers(form: str, strength: float) -> None:
    hmm, product = tiny_hmm(form), attributes()["one"]
    goal = compiled(hmm, evidence(), LENGTH, strength, neutral_end=False)
    check(hmm, goal, strength * rewards_of(hmm))
    goal = compiled(hmm, product, LENGTH, strength, neutral_end=False)
    check(hmm, goal, strength * product.probability(all_texts(LENGTH), counted(hmm)).log())


@pytest.mark.parametrize("form", ["dense", "eos"])
def test_goals_of_all_kinds_are_one_product(form: str) -> None:
    hmm, texts = tiny_hmm(form), all_texts(LENGTH)
    product, required = attributes()["one"], Attribute.contains("ba", SPELLED)
    others = torch.tensor([-0.2, 0.9, 0.3, 0.0], dtype=torch.float64)
    second = Attribute.from_rewards(others, first_only=False)
    goals = [
        Goal(evidence(), 3.0, neutral_end=False),
        Goal(~second, 0.5, neutral_end=False),
        Goal(product & required, 2.0, neutral_end=False),
    ]
    log_weights = 3.0 * rewards_of(hmm) - 0.5 * rewards_of(hmm, others)
    log_weights += 2.0 * product.probability(texts, counted(hmm)).log()
    log_weights += required.probability(texts, counted(hmm)).log()
    check(hmm, Compiler(hmm, LENGTH, exact=True).compile(goals), log_weights)


def test_sampled_texts_follow_the_posterior() -> None:
    hmm, count = tiny_hmm("dense"), 20_000
    request = Request(compiled(hmm, evidence(), LENGTH, 2.0, neutral_end=False), (), LENGTH)
    tracker, generator = PrefixTracker(hmm), torch.Generator().manual_seed(0)
    drawn = torch.zeros(count, 0, dtype=torch.long)
    for _ in range(LENGTH):
        tracker.step([request] * count, drawn.tolist())
        steered = reweighted(tracker, next_token_logits(hmm, drawn)).softmax(-1)
        drawn = torch.cat([drawn, torch.multinomial(steered, 1, generator=generator)], 1)
    code = (drawn * TOKENS ** torch.arange(LENGTH - 1, -1, -1)).sum(1)
    counts = torch.bincount(code, minlength=TOKENS**LENGTH)
    joint = (hmm.log_likelihood(all_texts(LENGTH)) + 2 * rewards_of(hmm)).exp()
    assert chisquare(counts, count * joint / joint.sum()).pvalue > 1e-3


def first_steered(after: Marker | None, text: list[int]) -> int:
    """Find the first token of the window in the text's bytes."""
    spelled = [b"".join(SPELLED[token] for token in text[:count]) for count in range(len(text) + 1)]
    if after is None:
        return 0
    found = (count for count, one in enumerate(spelled) if after.text.encode() in one)
    return next(found, len(text))


def in_window(
    hmm: HMM, attribute: Attribute, min_tokens: int, after: Marker | None, length: int | None
) -> Tensor:
    """Return p(what precedes the window) p(x) a(window) / Z of every text, by enumeration."""
    texts = all_texts(LENGTH)
    log_likelihood = hmm.log_likelihood(texts)
    probability = torch.where(log_likelihood > -60, log_likelihood.exp(), 0.0)
    weighted, before = probability.clone(), []
    for row, text in enumerate(texts.tolist()):
        begin = first_steered(after, text)
        end = None if length is None else begin + length
        tokens = [token for token in text[begin:end] if token not in hmm.config.eos_token_ids]
        if begin + min_tokens <= LENGTH and begin < LENGTH:
            weighted[row] *= attribute.probability([tokens])[0]
        before.append(tuple(text[:begin]))
    index = {prefix: number for number, prefix in enumerate(dict.fromkeys(before))}
    group = torch.tensor([index[prefix] for prefix in before])
    sums = torch.zeros(2, len(index), dtype=torch.float64)
    sums.index_add_(1, group, torch.stack([probability, weighted]))
    return torch.where(weighted > 0, weighted * (sums[0] / sums[1])[group], 0.0)


@pytest.mark.parametrize(
    ("after", "length"), [(B, None), (BA, None), (B, 1), (BA, 2), (None, 2), (B, LENGTH + 1)]
)
@pytest.mark.parametrize("name", ["one", "all", "must not", "weighed and must"])
@pytest.mark.parametrize("form", ["dense", "eos"])
def test_a_window_follows_the_exact_posterior(
    form: str, name: str, after: Marker | None, length: int | None
) -> None:
    """Also if texts end within it; what precedes and follows it, given it, is as without a goal."""
    hmm, attribute = tiny_hmm(form), attributes()[name]
    goal = compiled(hmm, attribute, LENGTH, neutral_end=False, after=after, window=length)
    if length is not None and length < goal.min_tokens:
        with pytest.raises(InvalidInputError, match="Raise the limit, or the goal's window"):
            Request(goal, (), LENGTH)
        return
    expected = in_window(hmm, attribute, goal.min_tokens, after, length)
    assert float(expected.sum()) == pytest.approx(1.0)
    steered = torch.where(expected > 0, steered_probabilities(hmm, goal), 0.0)
    torch.testing.assert_close(steered, expected, rtol=1e-9, atol=1e-12)


@given(
    seed=st.integers(0, 2**31),
    rewards=st.lists(st.floats(-50, 50), min_size=TOKENS, max_size=TOKENS),
)
def test_float32_agrees_with_float64_for_large_rewards_and_long_texts(
    seed: int, rewards: list[float]
) -> None:
    exact = tiny_hmm("dense")
    attribute = Attribute.from_rewards(torch.tensor(rewards, dtype=torch.float64), first_only=False)
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(0, TOKENS, (99,), generator=generator).tolist()
    logits = torch.randn(1, TOKENS, generator=generator)
    steered = []
    for hmm in (exact, exact.to(dtype=torch.float32)):
        request = Request(compiled(hmm, attribute, 100, neutral_end=False), (), 100)
        for length in (0, 50, 99):
            row = steer(hmm, [request], [text[:length]], logits.to(hmm.initial))
            steered.append(row.log_softmax(-1).double())
    for wide, single in zip(steered[:3], steered[3:], strict=True):
        assert bool(single.isfinite().all())
        torch.testing.assert_close(single.exp(), wide.exp(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["one", "not", "or", "all", "not weighed, and must"])
def test_long_improbable_texts_are_still_steered(name: str) -> None:
    """In float32 as in float64: nothing underflows, and the logits keep their digits."""
    written = [token % TOKENS for token in range(400)]
    steered = []
    for dtype in (torch.float32, torch.float64):
        hmm = tiny_hmm("dense").to(dtype=dtype)
        request = Request(compiled(hmm, attributes()[name], LENGTH), (), 1000)
        logits = torch.tensor([[0.25, 0.5, 0.125, 0.0]], dtype=dtype)
        steered.append(steer(hmm, [request], [written], logits).log_softmax(-1).double())
    torch.testing.assert_close(steered[0], steered[1], rtol=1e-3, atol=1e-3)
    assert steered[0].std() > 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_an_hmm_of_any_dtype_steers_alike(dtype: torch.dtype, form: str) -> None:
    steered = []
    for hmm in (tiny_hmm(form), tiny_hmm(form).to(dtype=dtype)):
        request = Request(compiled(hmm, attributes()["all"], LENGTH), (1, 2), 9)
        steered.append(steer(hmm, [request], [[3]], torch.zeros(1, TOKENS)))
    torch.testing.assert_close(steered[0], steered[1], rtol=0, atol=0.1)


def test_rewards_beyond_the_range_of_exponentials_combine_with_constraints() -> None:
    attribute = Attribute.from_rewards([8.0, -8.0, 0.0, 1.0]) ** 200
    both = attribute & Attribute.contains("ba", SPELLED)
    goal = compiled(tiny_hmm("dense"), both, LENGTH)
    steered = steer(goal.hmm, [Request(goal, (1,), 9)], [[0]], torch.zeros(1, TOKENS))
    assert steered.softmax(-1).isfinite().all()
