"""The normalisers of a step equal those of the whole vocabulary, whatever its ends are."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from foretrace.lookahead.price import limit_prices_, prices
from foretrace.steering.normalisers import Normalisers
from foretrace.steering.row_rules import RowRules

TOKENS = 7
LOGITS = st.one_of(st.floats(-30, 30), st.just(-torch.inf))
ROWS = st.lists(LOGITS, min_size=TOKENS, max_size=TOKENS)


def copies(ends: Tensor) -> Tensor:
    """Return which ends occur in an earlier column."""
    return (ends.unsqueeze(2) == ends.unsqueeze(1)).tril(-1).any(2)


@given(ROWS, ROWS, st.lists(st.integers(0, TOKENS - 1), max_size=3))
def test_the_price_equals_the_kl_divergence(
    row: list[float], factors: list[float], tokens: list[int]
) -> None:
    bare = torch.tensor([row])
    steered = bare + torch.tensor([factors])
    expected, kept = prices(bare, steered), bare.clone()
    ends = torch.tensor([tokens], dtype=torch.long)
    normalisers = Normalisers.of(bare, steered.clone(), ends, copies(ends), priced=True)
    torch.testing.assert_close(normalisers.prices(), expected, rtol=1e-4, atol=2e-5)
    assert torch.equal(bare, kept)


@given(ROWS, ROWS, st.lists(st.integers(0, TOKENS - 1), min_size=1, max_size=3))
def test_neutral_ends_have_their_bare_probability(
    row: list[float], factors: list[float], tokens: list[int]
) -> None:
    bare, ends = torch.tensor([row]), torch.tensor([tokens])
    steered = bare + torch.tensor([factors])
    neutral = torch.ones_like(ends, dtype=torch.bool)
    normalisers = Normalisers.of(bare, steered, ends, copies(ends), priced=True)
    normalisers = normalisers.with_neutral_ends(neutral)
    steered.scatter_(1, ends, normalisers.steered_ends)
    others = [token for token in range(TOKENS) if token not in tokens]
    possible = [logits[0, others].isfinite().any() for logits in (bare, steered)]
    if all(possible):
        torch.testing.assert_close(steered.softmax(-1)[:, tokens], bare.softmax(-1)[:, tokens])
    expected = prices(bare, steered)
    torch.testing.assert_close(normalisers.prices(), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("measure", [False, True])
def test_a_row_below_its_limit_keeps_every_bit(measure: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    bare = torch.randn(20, 50, generator=generator)
    strengths = torch.linspace(0, 2, 20).unsqueeze(1)
    steered = bare + strengths * torch.randn(20, 50, generator=generator)
    before, limited = prices(bare, steered), bare.clone()
    rules = RowRules(torch.full((20, 1), 0.5), None, None, None, None)
    price = rules.apply_(limited, steered.clone(), 50, measure=measure)
    fits = before <= 0.5
    assert 5 < fits.sum() < 15
    assert torch.equal(limited[fits], steered[fits])
    after = prices(bare, limited)
    assert bool((after[~fits] > 0.49).all())
    assert bool((after[~fits] <= 0.501).all())
    if measure:
        assert price is not None
        torch.testing.assert_close(price, after)


def test_bfloat16_logits_are_normalised_in_float32() -> None:
    """The probability of an end is that of the bare logits, not of their rounded sum."""
    generator = torch.Generator().manual_seed(0)
    bare = torch.randn(4, 1000, generator=generator).bfloat16()
    steered, ends = bare.float(), torch.zeros(4, 1, dtype=torch.long)
    neutral = torch.ones(4, 1, dtype=torch.bool)
    rules = RowRules(None, ends, torch.zeros_like(neutral), neutral, None)
    expected = steered.softmax(-1)
    steered[:, 1:500] += 1.0
    rules.apply_(bare.clone(), steered, 1000, measure=False)
    torch.testing.assert_close(steered.softmax(-1)[:, 0], expected[:, 0])


@pytest.mark.parametrize("limit", [0.05, 0.5, torch.inf])
def test_a_limit_and_neutral_ends_together(limit: float) -> None:
    """Equal to one rule after the other: the limit counts the ends as they are steered."""
    generator = torch.Generator().manual_seed(0)
    bare = torch.randn(20, 50, generator=generator)
    steered = bare + torch.randn(20, 50, generator=generator)
    ends = torch.tensor([[3, 8, 3]]).expand(20, 3)
    limits, neutral = torch.full((20, 1), limit), torch.ones(20, 1, dtype=torch.bool)
    neutral[::2] = False
    limited = steered.clone()
    limit_prices_(bare, limited, limits)
    expected = torch.where(prices(bare, steered).unsqueeze(1) > limits, limited, steered)
    log_bare, log_steered = (
        logits.index_fill(1, ends[0], -torch.inf).logsumexp(1, keepdim=True)
        for logits in (bare, expected)
    )
    kept = bare.gather(1, ends) + log_steered - log_bare
    expected = torch.where(neutral, expected.scatter(1, ends, kept), expected)
    found, rules = bare.clone(), RowRules(limits, ends, copies(ends), neutral, None)
    price = rules.apply_(found, steered.clone(), 50, measure=True)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(price, prices(bare, expected), rtol=1e-4, atol=1e-6)
