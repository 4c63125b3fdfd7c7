"""The algebra of attributes applies to their context rewards."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foretrace.attribute import Attribute, ContextReward
from foretrace.attribute.terms import Terms
from foretrace.errors import InvalidInputError

HEAD = "sha256:head"
STATE, ROWS = torch.tensor([0.5, -1.0]), torch.tensor([[1.0, 2.0], [0.0, -1.0], [3.0, 0.5]])


def reward(seed: int, rank: int = 2) -> ContextReward:
    generator = torch.Generator().manual_seed(seed)
    readers = torch.randn(rank, 3, generator=generator)
    return ContextReward(readers, torch.randn(rank, 2, generator=generator), HEAD)


def rewards(attribute: Attribute) -> Tensor:
    """Return the context rewards of three tokens, by the definition."""
    context = attribute.context
    assert context is not None
    read = context.readers @ torch.cat([STATE, torch.ones(1)])
    return (ROWS - ROWS.mean(0)) @ (context.writers.T @ read)


kind = Attribute.from_rewards([1.0, -1.0, 0.5], name="kind").with_context(reward(0))
bold = Attribute(Terms.one(), context=reward(1, rank=3)).renamed("bold")
polite = Attribute.from_weights([1.0, 0.5, 0.9], name="polite")

COMBINED: dict[str, tuple[Attribute, Callable[[], Tensor]]] = {
    "and": (kind & bold, lambda: rewards(kind) + rewards(bold)),
    "with a product": (polite & bold, lambda: rewards(bold)),
    "negation": (~kind, lambda: -rewards(kind)),
    "double negation": (~~kind, lambda: rewards(kind)),
    "of context alone": (~bold, lambda: -rewards(bold)),
    "power": (kind**2.5, lambda: 2.5 * rewards(kind)),
    "all": ((~kind & polite & bold) ** 2, lambda: 2 * (rewards(bold) - rewards(kind))),
    "renamed": (kind.renamed("nice"), lambda: rewards(kind)),
}


@pytest.mark.parametrize("name", COMBINED)
def test_combinations_are_exact(name: str) -> None:
    combined, expected = COMBINED[name]
    torch.testing.assert_close(rewards(combined), expected())
    assert combined.has_power


def test_factors_keep_their_context_rewards() -> None:
    assert (kind & polite & bold).factors == (kind, polite, bold)


def test_probabilities_are_by_words() -> None:
    texts = [[0, 1], [2], []]
    bare = kind.with_context(None)
    assert torch.equal(kind.probability(texts), bare.probability(texts))
    assert bold.probability(texts).tolist() == [1.0] * 3
    assert bold.top_tokens() == []


def test_another_context_reward_makes_levels_and_report_invalid() -> None:
    record = {"auc": 0.9, "report": {}, "calibration": {}}
    config = replace(kind.config, levels={"mild": 1.0}, fit=record)
    changed = replace(kind, config=config).with_context(None)
    assert (changed.config.levels, changed.config.fit) == ({}, {"auc": 0.9})


def test_what_has_no_exact_form_is_refused() -> None:
    other = replace(reward(2), fingerprint="sha256:other")
    with pytest.raises(InvalidInputError, match=r"different LMs.*head.*other.*one LM"):
        _ = kind & kind.with_context(other)
    for left, right in ((bold, polite), (polite, bold)):
        with pytest.raises(InvalidInputError, match=r"bold has rewards, which \| cannot combine"):
            _ = left | right
    for conjunction in (polite & bold, kind & kind):
        with pytest.raises(InvalidInputError, match="Negate single attributes"):
            _ = ~conjunction


@pytest.mark.parametrize(
    ("readers", "writers", "fingerprint"),
    [
        (torch.ones(2, 3), torch.ones(3, 2), HEAD),
        (torch.ones(2, 2), torch.ones(2, 2), HEAD),
        (torch.ones(3), torch.ones(2), HEAD),
        (torch.ones(0, 3), torch.ones(0, 2), HEAD),
        (torch.full((1, 3), torch.nan), torch.ones(1, 2), HEAD),
        (torch.ones(1, 3), torch.ones(1, 2), ""),
    ],
)
def test_malformed_rewards_are_refused(readers: Tensor, writers: Tensor, fingerprint: str) -> None:
    with pytest.raises(InvalidInputError, match="context reward"):
        ContextReward(readers, writers, fingerprint)
