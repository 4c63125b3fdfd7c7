"""The EAP equals an enumeration of all continuations, and is in [0, 1] for every dtype."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foretrace.attribute import Attribute
from foretrace.errors import InvalidInputError, TokenizerMismatchError
from foretrace.hmm import HMM, HMMConfig
from foretrace.lookahead import Lookahead
from foretrace.lookahead.tables import BELIEF_STEPS
from tiny import FORMS, TOKENS, all_texts, dense_tables, path_probabilities, tiny_hmm
from tiny_attributes import SPELLED, WEIGHTS, attributes

HORIZON = 5
EXAMPLE = Path(__file__).parents[2] / "examples" / "smollm2-135m"


def brute_force(hmm: HMM, attribute: Attribute, prefix: Tensor, remaining: int) -> Tensor:
    """Sum p(x) p(s | x) over all continuations of the prefix, by their first token: (V,)."""
    later = all_texts(1 + remaining)
    texts = torch.cat([prefix.expand(len(later), -1), later], 1)
    probability = path_probabilities(hmm, texts)[1].sum(0)
    eos = torch.tensor(hmm.config.eos_token_ids, dtype=torch.long)
    counted = ~torch.isin(later, eos)  # end of text has weight 1
    has_it = attribute.probability(later, counted)
    both = torch.zeros(TOKENS, dtype=torch.float64).index_add_(0, later[:, 0], probability * has_it)
    alone = torch.zeros(TOKENS, dtype=torch.float64).index_add_(0, later[:, 0], probability)
    return torch.where(alone > 0, both / alone, torch.nan)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", attributes())
@pytest.mark.parametrize("prefix", [(), (1,), (3, 0)])
def test_eap_equals_enumeration(form: str, name: str, prefix: tuple[int, ...]) -> None:
    hmm, attribute = tiny_hmm(form), attributes()[name]
    start = torch.tensor(prefix, dtype=torch.long)
    wide = Lookahead(hmm, attribute, HORIZON)
    narrow = Lookahead(hmm.to(dtype=torch.float32), attribute, HORIZON)
    for remaining in range(4 if form == "structured" else HORIZON - len(prefix)):
        expected = brute_force(hmm, attribute, start, remaining)
        possible = ~expected.isnan()
        eap = wide.eap(start, remaining)
        assert (eap - expected)[possible].abs().max() < 1e-10
        assert (narrow.eap(start, remaining) - expected)[possible].abs().max() < 1e-5


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("remaining", [0, 1, 3])
def test_the_probability_that_missing_text_comes_equals_enumeration(
    form: str, remaining: int
) -> None:
    """After each next token, over the mean HMM state."""
    hmm, attribute = tiny_hmm(form), Attribute.contains("ab", SPELLED)
    lookahead = Lookahead(hmm, attribute, 4).with_missing()
    assert lookahead.terms.automaton is not None
    initial, transition, emission = dense_tables(hmm)
    beliefs = torch.stack([initial @ transition.matrix_power(t) for t in range(BELIEF_STEPS)])
    average = HMM(beliefs.mean(0) @ transition, transition, emission)
    later = all_texts(remaining).long()
    chances = path_probabilities(average, later)[1].sum(0)
    for token in range(TOKENS):
        texts = torch.cat([torch.full((len(later), 1), token), later], 1)
        counted = ~torch.isin(texts, torch.tensor(hmm.config.eos_token_ids, dtype=torch.long))
        expected = chances @ attribute.probability(texts, counted)
        state = lookahead.terms.automaton.dfa.step(torch.tensor(0), torch.tensor(token))
        if expected == 0:  # the table itself is 0
            continue
        found = lookahead.tables.log_missing[remaining, 0, state].exp()
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["one", "all", "must not", "weighed or must"])
def test_nothing_is_missing_without_required_text(name: str) -> None:
    lookahead = Lookahead(tiny_hmm("dense"), attributes()[name], HORIZON)
    assert lookahead.with_missing().tables is lookahead.tables


def test_more_remaining_tokens_than_the_horizon_use_the_horizon() -> None:
    hmm, attribute = tiny_hmm("dense"), attributes()["all"]
    lookahead = Lookahead(hmm, attribute, 3)
    assert torch.equal(lookahead.eap(torch.tensor([1]), 100), lookahead.eap(torch.tensor([1]), 3))


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 10**6),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from(["one", "mixture", "or", "not", "all"]),
)
def test_eap_is_a_probability_in_every_dtype(seed: int, dtype: torch.dtype, name: str) -> None:
    hmm = HMM.random(24, TOKENS, seed=seed).to(dtype=dtype)
    eap = Lookahead(hmm, attributes()[name], 12).eap(torch.tensor([0, 3, 1]), seed % 13)
    assert ((eap >= 0) & (eap <= 1)).all()


def test_a_small_complement_keeps_its_digits() -> None:
    """1 - p of an attribute with p near 1 is not rounding noise."""
    hmm = tiny_hmm("dense")
    weights = 1 - torch.tensor([1e-9, 0.0, 2e-9, 0.0], dtype=torch.float64)
    attribute = ~Attribute.from_weights(weights)
    exact = Lookahead(hmm, attribute, HORIZON).eap(torch.tensor([1]), 3)
    narrow = Lookahead(hmm.to(dtype=torch.float32), attribute, HORIZON).eap(torch.tensor([1]), 3)
    torch.testing.assert_close(narrow.double(), exact, rtol=1e-5, atol=0)


def test_a_horizon_of_zero_weighs_the_next_token_alone() -> None:
    lookahead = Lookahead(tiny_hmm("dense"), attributes()["one"], 0)
    eap = lookahead.eap(torch.tensor([1, 2]), remaining=3)
    torch.testing.assert_close(eap, WEIGHTS[0])


def test_attributes_that_do_not_fit_the_hmm_are_refused() -> None:
    hmm = tiny_hmm("dense")
    with pytest.raises(InvalidInputError, match="vocabulary of 4"):
        Lookahead(hmm, Attribute.from_weights(torch.full((TOKENS + 1,), 0.5)), 5)
    with pytest.raises(InvalidInputError, match="horizon"):
        Lookahead(hmm, attributes()["one"], -1)
    always = attributes()["nothing to weigh"]
    with pytest.raises(InvalidInputError, match="contradict each other"):
        Lookahead(hmm, ~always, 5)
    named = HMM(hmm.initial, hmm.transition, hmm.emission, HMMConfig(tokenizer_fingerprint="a"))
    other = Attribute.from_weights(WEIGHTS[0], tokenizer_fingerprint="b")
    with pytest.raises(TokenizerMismatchError):
        Lookahead(named, other, 5)


@pytest.mark.parametrize("name", ["one", "not", "all"])
def test_a_token_that_no_state_emits_has_the_average_eap(name: str) -> None:
    """Its EAP is the mean over all continuations, times its weight."""
    hmm = tiny_hmm("dense")
    table = hmm.emission.of_tokens(torch.arange(TOKENS))
    table[1] = 0
    silent = HMM(hmm.initial, hmm.transition, table / table.sum(0))
    attribute = attributes()[name]
    eap = Lookahead(silent, attribute, HORIZON).eap(torch.tensor([3]), 2)
    later = all_texts(2)
    # The token does not change the predicted state; only its weight counts.
    predicted = silent.filter(torch.tensor([[3]])).predicted[0]
    carried = HMM(silent.transition.predict(predicted)[0], silent.transition, silent.emission)
    probability = path_probabilities(carried, later)[1].sum(0)
    texts = torch.cat([torch.ones(len(later), 1, dtype=torch.long), later], 1)
    expected = (probability * attribute.probability(texts)).sum()
    assert float(eap[1]) == pytest.approx(float(expected), abs=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("complement", [False, True])
def test_eap_is_a_probability_on_a_distilled_hmm(dtype: torch.dtype, complement: bool) -> None:
    hmm = HMM.from_pretrained(EXAMPLE).to(dtype=dtype)
    random = torch.Generator().manual_seed(0)
    weights = torch.ones(hmm.vocab_size)
    chosen = torch.randperm(hmm.vocab_size, generator=random)[:5000]
    weights[chosen] = torch.rand(5000, generator=random)
    attribute = Attribute.from_weights(weights)
    lookahead = Lookahead(hmm, ~attribute if complement else attribute, 20)
    for remaining in (0, 5, 20):
        eap = lookahead.eap(torch.randint(3, hmm.vocab_size, (9,), generator=random), remaining)
        assert ((eap >= 0) & (eap <= 1)).all()
        assert eap.std() > 0


def test_a_prefix_may_be_a_list_an_array_or_a_tensor() -> None:
    lookahead = Lookahead(tiny_hmm("dense"), attributes()["all"], HORIZON)
    expected = lookahead.eap(torch.tensor([1, 2]), 3)
    for prefix in ([1, 2], (1, 2), np.array([1, 2]), np.array([1, 2], dtype=np.int32)):
        assert torch.equal(lookahead.eap(prefix, 3), expected)
    empty = lookahead.eap(torch.tensor([], dtype=torch.long), 3)
    for prefix in ([], np.array([])):
        assert torch.equal(lookahead.eap(prefix, 3), empty)


def test_a_prefix_must_be_one_sequence_of_known_token_ids() -> None:
    lookahead = Lookahead(tiny_hmm("dense"), attributes()["one"], HORIZON)
    wrong: tuple[Any, ...] = (torch.tensor([[1, 2]]), [1.5], torch.tensor([True]))
    for prefix in wrong:
        with pytest.raises(InvalidInputError, match="token ids of one sequence"):
            lookahead.eap(prefix, 3)
    for prefix in ([TOKENS], [1, -1]):
        with pytest.raises(InvalidInputError, match="from 0 to 3"):
            lookahead.eap(prefix, 3)


def test_a_negative_number_of_remaining_tokens_is_refused() -> None:
    lookahead = Lookahead(tiny_hmm("dense"), attributes()["one"], HORIZON)
    with pytest.raises(InvalidInputError, match="0 or more tokens, but is -1"):
        lookahead.eap([1], remaining=-1)


@pytest.mark.parametrize("name", ["one", "all", "must", "weighed and must"])
def test_the_eap_along_a_text_counts_what_was_generated(name: str) -> None:
    """At each position, as for all continuations of the text so far."""
    hmm, attribute, text, limit = tiny_hmm("dense"), attributes()[name], [0, 3, 1], 4
    lookahead = Lookahead(hmm, attribute, HORIZON)
    found = [one.exp() for one in lookahead.log_eap_along(lookahead.predicted([2]), text, limit)]
    assert len(found) == len(text)
    for position, eap in enumerate(found):
        before, later = text[:position], all_texts(limit - position)
        whole = torch.cat([torch.tensor(before).long().expand(len(later), -1), later], 1)
        prompt = torch.tensor([2]).expand(len(later), -1)
        probability = path_probabilities(hmm, torch.cat([prompt, whole], 1))[1].sum(0)
        sums = torch.zeros(2, TOKENS, dtype=torch.float64)
        parts = torch.stack([probability * attribute.probability(whole), probability])
        sums.index_add_(1, later[:, 0], parts)
        torch.testing.assert_close(eap, sums[0] / sums[1])


def test_a_reward_counts_once_along_a_text() -> None:
    rewards = [0.7, -0.4, 0.0, -1.1]
    along = []
    for first_only in (False, True):
        attribute = Attribute.from_rewards(rewards, first_only=first_only)
        lookahead = Lookahead(tiny_hmm("dense"), attribute, HORIZON)
        along.append([*lookahead.log_eap_along(lookahead.predicted([1]), [0, 3, 0, 2], 6)][-1])
    ratio = along[0] - along[1] - rewards[0]  # the second 0 is in the past
    expected = torch.tensor([rewards[0], 0.0, 0.0, rewards[3]], dtype=torch.float64)
    torch.testing.assert_close(ratio, expected)
