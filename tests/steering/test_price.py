"""The price of steering, its limit, and ends of text that keep their probability."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from foretrace.steering.price import Normalisers, RowRules, limit_prices_, prices, row_blocks

TOKENS = 7
LOGITS = st.one_of(st.floats(-30, 30), st.just(-torch.inf))
ROWS = st.lists(LOGITS, min_size=TOKENS, max_size=TOKENS)
BARE = torch.tensor([[8.0, 0.0, 1.0, -2.0], [0.0, 0.0, 0.0, -torch.inf]])


def rules(vocab_size: int, **some: Any) -> RowRules:
    """Return rules that process all rows at once, and limit those that exceed their limit."""
    names = ("max_price", "ends", "is_copy", "is_neutral", "is_steered")
    return RowRules(
        **{name: some.get(name) for name in names},
        vocab_size=vocab_size,
        row_elements=some.get("row_elements"),
        limits_all_rows=some.get("limits_all_rows", False),
    )


def copies(ends: Tensor) -> Tensor:
    """Return which ends occur in an earlier column."""
    return (ends.unsqueeze(2) == ends.unsqueeze(1)).tril(-1).any(2)


def test_the_price_is_the_kl_divergence() -> None:
    steered = BARE + torch.tensor([[0.0, 2.0, -1.0, 3.0], [1.0, 1.0, 1.0, 5.0]])
    p, q = steered[0].softmax(-1), BARE[0].softmax(-1)
    expected = torch.stack([(p * (p / q).log()).sum(), torch.tensor(0.0)])
    torch.testing.assert_close(prices(BARE, steered), expected)


def test_prices_of_many_rows_are_computed_in_blocks() -> None:
    generator = torch.Generator().manual_seed(0)
    bare = torch.randn(5, 200_000, generator=generator)
    steered = bare + torch.randn(5, 200_000, generator=generator)
    assert len(row_blocks(bare, 1 << 18)) == 5
    p, q = steered.double().log_softmax(-1), bare.double().log_softmax(-1)
    expected = (p.exp() * (p - q)).sum(-1).float()
    torch.testing.assert_close(prices(bare, steered), expected, rtol=1e-4, atol=0)


@given(ROWS, ROWS, st.lists(st.integers(0, TOKENS - 1), max_size=3))
def test_the_normalisers_give_the_price(
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
    if all(logits[0, others].isfinite().any() for logits in (bare, steered)):
        torch.testing.assert_close(steered.softmax(-1)[:, tokens], bare.softmax(-1)[:, tokens])
    expected = prices(bare, steered)
    torch.testing.assert_close(normalisers.prices(), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("forbidden", [-torch.inf, -1e4, -1e30])
def test_a_limit_does_not_allow_forbidden_tokens(forbidden: float) -> None:
    """Token 0 has almost all probability: not to generate it costs more than the limit."""
    steered = BARE.clone()
    steered += torch.tensor([[forbidden, 3.0, 0.0, -1.0], [5.0, 0.0, 0.0, 0.0]])
    limit_prices_(BARE, steered, torch.tensor([[2.0], [0.5]]))
    probabilities = steered.softmax(-1)
    assert float(probabilities[0, 0]) == 0
    torch.testing.assert_close(probabilities[0, 1:], BARE[0, 1:].softmax(-1))
    assert 0.49 < float(prices(BARE, steered)[1]) <= 0.5005


@pytest.mark.parametrize("spread", [0.5, 5.0, 50.0])
@pytest.mark.parametrize("limit", [0.05, 1.0])
@pytest.mark.parametrize("measure", [False, True])
def test_a_limit_is_used_up(spread: float, limit: float, measure: bool) -> None:
    """Rows below the limit keep every bit; the others cost it, within one in a hundred."""
    generator = torch.Generator().manual_seed(0)
    bare = 3 * torch.randn(40, 2000, generator=generator)
    strengths = torch.linspace(0, spread, 40)[:, None]
    steered = bare + strengths * torch.randn(40, 2000, generator=generator)
    limited, limits = bare.clone(), torch.full((40, 1), limit)
    price = rules(2000, max_price=limits).apply_(limited, steered.clone(), measure=measure)
    before, after = prices(bare, steered), prices(bare, limited)
    fits = before <= limit
    assert torch.equal(limited[fits], steered[fits])
    assert bool((after[~fits] <= 1.002 * limit).all())
    assert bool((after[~fits] > 0.99 * limit).all())
    shares = (limited - bare)[:, 0] / (steered - bare)[:, 0]
    expected = bare + shares[:, None] * (steered - bare)  # one share for all tokens
    torch.testing.assert_close(limited[~fits], expected[~fits], rtol=1e-4, atol=1e-3)
    if measure:
        assert price is not None
        torch.testing.assert_close(price, after, rtol=1e-3, atol=1e-5)


def test_bfloat16_logits_are_normalised_in_float32() -> None:
    """The probability of an end follows from the bare logits, not from their rounded sum."""
    generator = torch.Generator().manual_seed(0)
    bare = torch.randn(4, 1000, generator=generator).bfloat16()
    steered, ends = bare.float(), torch.zeros(4, 1, dtype=torch.long)
    neutral = torch.ones(4, 1, dtype=torch.bool)
    expected = steered.softmax(-1)
    steered[:, 1:500] += 1.0
    kept = rules(1000, ends=ends, is_copy=torch.zeros_like(neutral), is_neutral=neutral)
    kept.apply_(bare.clone(), steered, measure=False)
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
    both = {"max_price": limits, "ends": ends, "is_copy": copies(ends), "is_neutral": neutral}
    found = bare.clone()
    price = rules(50, **both).apply_(found, steered.clone(), measure=True)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(price, prices(bare, expected), rtol=1e-4, atol=1e-6)
