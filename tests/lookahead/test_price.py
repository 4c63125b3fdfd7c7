"""The price of steering, and its limit."""

import pytest
import torch

from foretrace.hmm.probability import row_blocks
from foretrace.lookahead.price import limit_prices_, prices
from foretrace.steering.row_rules import RowRules

BARE = torch.tensor([[8.0, 0.0, 1.0, -2.0], [0.0, 0.0, 0.0, -torch.inf]])


def test_the_price_is_the_kl_divergence() -> None:
    steered = BARE + torch.tensor([[0.0, 2.0, -1.0, 3.0], [1.0, 1.0, 1.0, 5.0]])
    p, q = steered[0].softmax(-1), BARE[0].softmax(-1)
    expected = torch.stack([(p * (p / q).log()).sum(), torch.tensor(0.0)])
    torch.testing.assert_close(prices(BARE, steered), expected)


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
def test_a_limit_is_used_up(spread: float, limit: float) -> None:
    """Rows below the limit keep every bit; the others cost it, within one in a hundred."""
    generator = torch.Generator().manual_seed(0)
    bare = 3 * torch.randn(40, 2000, generator=generator)
    strengths = torch.linspace(0, spread, 40)[:, None]
    steered = bare + strengths * torch.randn(40, 2000, generator=generator)
    limited, rules = bare.clone(), RowRules(torch.full((40, 1), limit), None, None, None, None)
    rules.apply_(limited, steered.clone(), 2000, measure=False)
    before, after = prices(bare, steered), prices(bare, limited)
    fits = before <= limit
    assert torch.equal(limited[fits], steered[fits])
    assert bool((after[~fits] <= 1.002 * limit).all())
    assert bool((after[~fits] > 0.99 * limit).all())
    factors = limited - bare
    shares = factors[:, 0] / (steered - bare)[:, 0]
    expected = bare + shares[:, None] * (steered - bare)  # one share for all tokens
    torch.testing.assert_close(limited[~fits], expected[~fits], rtol=1e-4, atol=1e-3)


def test_prices_of_many_rows_are_those_of_each() -> None:
    """On CPUs, they are computed in blocks of rows."""
    generator = torch.Generator().manual_seed(0)
    bare = torch.randn(5, 200_000, generator=generator)
    steered = bare + torch.randn(5, 200_000, generator=generator)
    assert len(row_blocks(bare)) > 1
    alone = torch.cat([prices(bare[i : i + 1], steered[i : i + 1]) for i in range(5)])
    torch.testing.assert_close(prices(bare, steered), alone)
    p, q = steered.double().log_softmax(-1), bare.double().log_softmax(-1)
    torch.testing.assert_close(alone, (p.exp() * (p - q)).sum(-1).float(), rtol=1e-4, atol=0)
