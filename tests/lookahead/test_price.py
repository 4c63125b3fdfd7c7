"""The price of steering, and its limit."""

import pytest
import torch

from foretrace.lookahead.price import limit_prices_, prices

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
    limit_prices_(BARE, steered, torch.tensor([2.0, 0.5]))
    probabilities = steered.softmax(-1)
    assert float(probabilities[0, 0]) == 0
    torch.testing.assert_close(probabilities[0, 1:], BARE[0, 1:].softmax(-1))
    assert 0.49 < float(prices(BARE, steered)[1]) <= 0.5
