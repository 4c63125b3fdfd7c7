"""Drawing next tokens: exact probabilities, and random numbers that belong to tokens."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from transformers import TopPLogitsWarper

from foretrace.engines.transformers.nucleus import (
    TOP_K,
    TOP_K_OF_WIDE,
    draw_nucleus,
    log_totals,
    token_nats,
)
from foretrace.errors import InvalidInputError

TOP_P, MANY, SIZE = 0.9, 5_000, 3 * TOP_K


def nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Return the log-probabilities of the nucleus, by transformers' own, which sorts."""
    if top_p < 1:
        logits = TopPLogitsWarper(top_p)(torch.zeros(len(logits), 1), logits.clone())
    return logits.log_softmax(-1)


@pytest.fixture(name="logits")
def some_logits() -> Tensor:
    """A row with few likely tokens, and one whose nucleus is almost the whole vocabulary."""
    torch.manual_seed(0)
    return torch.stack([torch.randn(SIZE) * 8, torch.randn(SIZE) * 0.1])


@pytest.mark.parametrize("size", [SIZE, 2 * TOP_K_OF_WIDE])
def test_a_nucleus_is_exact_whether_it_is_small_or_large(size: int) -> None:
    torch.manual_seed(0)
    logits = torch.stack([torch.randn(size) * 8, torch.randn(size) * 0.1])
    kept = nucleus(logits, TOP_P)
    assert int(kept[1].isfinite().sum()) > (TOP_K if size == SIZE else TOP_K_OF_WIDE)
    for _ in range(20):
        drawn = draw_nucleus(logits, TOP_P)
        torch.testing.assert_close(
            drawn.log_probability, kept.gather(1, drawn.tokens[:, None])[:, 0]
        )


@pytest.mark.parametrize("top_p", [TOP_P, 1.0])
@pytest.mark.parametrize("scale", [8.0, 1.5])
def test_tokens_are_drawn_as_often_as_they_are_probable(top_p: float, scale: float) -> None:
    """Also those beyond the first TOP_K; compared in groups of tokens of similar probability."""
    torch.manual_seed(1)
    logits = torch.randn(SIZE) * scale
    drawn = draw_nucleus(logits.expand(MANY, -1), top_p).tokens
    probability = nucleus(logits[None], top_p)[0].exp()
    order = probability.argsort(descending=True)
    group = torch.zeros(SIZE, dtype=torch.long)
    group[order] = (probability[order].cumsum(0) * 20).long().clamp_max(19)
    expected = torch.zeros(20).index_add(0, group, probability) * MANY
    found = torch.bincount(group[drawn], minlength=20)
    assert not bool((probability[drawn] == 0).any())
    deviations = (found - expected).abs() / expected.clamp_min(1).sqrt()
    assert float(deviations.max()) < 4.5


def test_rows_draw_independently_of_each_other() -> None:
    torch.manual_seed(2)
    pairs = draw_nucleus(torch.zeros(2 * MANY, 4), 1.0).tokens.view(MANY, 2)
    counts = torch.bincount(pairs[:, 0] * 4 + pairs[:, 1], minlength=16)
    assert float((counts - MANY / 16).abs().max()) < 4.5 * (MANY / 16) ** 0.5


def test_the_same_numbers_draw_the_same_tokens_where_distributions_are_alike(
    logits: Tensor,
) -> None:
    """Even in another order of tokens, and if the nucleus of one is sorted whole."""
    nudged = logits + 0.02 * torch.randn_like(logits)
    same = []
    for top_p in (TOP_P, 1.0):
        first, second = (
            draw_nucleus(each.repeat(500, 1), top_p, torch.Generator().manual_seed(3)).tokens
            for each in (logits, nudged)
        )
        same.append(float((first == second).float().mean()))
    assert min(same) > 0.95
    assert max(same) < 1


def test_a_generator_decides_alone() -> None:
    """Two numbers for each row are taken from it, whatever is drawn."""
    generators = [torch.Generator().manual_seed(4) for _ in range(2)]
    for size, generator in zip((4, SIZE), generators, strict=True):
        draw_nucleus(torch.zeros(3, size), TOP_P, generator)
    one, other = (draw_nucleus(torch.zeros(9, 9), 1.0, each).tokens for each in generators)
    assert torch.equal(one, other)


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = torch.full((50, SIZE), -torch.inf)
    logits[:, 7] = -2.0
    for top_p in (TOP_P, 1.0):
        drawn = draw_nucleus(logits, top_p)
        assert drawn.tokens.tolist() == [7] * 50
        assert drawn.log_probability.abs().max() < 1e-6


def test_a_rounded_sum_leaves_nothing_for_forbidden_tokens() -> None:
    """The allowed tokens are all among the first, and their probabilities sum to almost 1."""
    torch.manual_seed(0)
    logits = torch.full((4_000, SIZE), -torch.inf)
    logits[:, :500] = torch.randn(4_000, 500)
    for _ in range(20):
        drawn = draw_nucleus(logits, 1.0)
        assert int(drawn.tokens.max()) < 500
        assert bool(drawn.log_probability.isfinite().all())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_rows_without_finite_logits_are_refused(value: float, logits: Tensor) -> None:
    logits[1] = value
    with pytest.raises(InvalidInputError, match=r"row 1.*bfloat16 or float32"):
        draw_nucleus(logits, TOP_P)


def test_losses_are_those_of_log_softmax(logits: Tensor) -> None:
    tokens = torch.tensor([5, 9])
    expected = -logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(token_nats(logits, tokens), expected)
    torch.testing.assert_close(log_totals(logits), logits.logsumexp(-1, keepdim=True))
    assert log_totals(logits[:0]).shape == (0, 1)
