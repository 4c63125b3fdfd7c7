"""The fit of context rewards recovers what was planted, and does not find what is not there."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foretrace.attribute.fitting.context import TokenStates, fit_context
from foretrace.errors import InvalidInputError

WIDTH, VOCAB, TEXTS, LENGTH = 12, 40, 4_000, 16
NO_REWARDS = torch.zeros(VOCAB)


def features() -> tuple[Tensor, Tensor, Tensor]:
    """Rows of a head with principal directions of their own, their features and the basis."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(VOCAB, WIDTH, generator=generator) * torch.linspace(1, 3, WIDTH)
    centred = rows - rows.mean(0)
    variances, directions = torch.linalg.eigh(centred.T @ centred / VOCAB)
    deviations = variances.sqrt()
    return centred, centred @ directions / deviations, directions * deviations


def planted(*, noise: bool = False) -> TokenStates:
    """Texts whose even tokens speak for the score where h_0 > 0, and against it elsewhere."""
    generator = torch.Generator().manual_seed(0)
    count = TEXTS * LENGTH
    states = 2 + 3 * torch.randn(count, WIDTH, generator=generator)
    tokens = torch.randint(VOCAB, (count,), generator=generator)
    texts = torch.arange(TEXTS).repeat_interleave(LENGTH)
    effect = (features()[1][tokens, 0]) * (states[:, 0] - 2).sign()
    log_odds = torch.zeros(TEXTS).index_add(0, texts, effect)
    if noise:
        log_odds = torch.zeros(TEXTS)
    scores = torch.rand(TEXTS, generator=generator) < log_odds.sigmoid()
    held_out = torch.arange(TEXTS) % 5 == 0
    return TokenStates(torch.split(states.half(), 7_000), tokens, texts, scores.float(), held_out)


def test_an_effect_that_depends_on_the_context_is_recovered() -> None:
    centred, table, basis = features()
    data, steps = planted(), []
    fitted = fit_context(
        data,
        NO_REWARDS,
        table.half(),
        basis,
        "sha256:0",
        on_progress=lambda *step: steps.append(step),
    )
    assert fitted.improves
    assert steps[-1] == (len(steps), len(steps))
    states = torch.full((2, WIDTH + 1), 2.0)
    states[:, 0], states[:, -1] = torch.tensor([5.0, -1.0]), 1.0
    rewards = (states @ fitted.reward.readers.T) @ (fitted.reward.writers @ centred.T)
    for reward, sign in zip(rewards, (1, -1), strict=True):
        assert torch.corrcoef(torch.stack([reward, sign * table[:, 0]]))[0, 1] > 0.8


def test_noise_does_not_improve_the_loss() -> None:
    _, table, basis = features()
    fitted = fit_context(planted(noise=True), NO_REWARDS, table, basis, "sha256:0")
    assert not fitted.improves


def test_the_fit_depends_on_the_seed_and_not_on_shards() -> None:
    _, table, basis = features()
    data = planted()
    short = replace(data, held_out=data.held_out | (torch.arange(TEXTS) > 300))
    torch.manual_seed(1)
    first = fit_context(short, NO_REWARDS, table, basis, "sha256:0")
    second = fit_context(
        replace(short, shards=[torch.cat(list(data.shards))]), NO_REWARDS, table, basis, "x"
    )
    other = fit_context(short, NO_REWARDS, table, basis, "sha256:0", seed=1)
    assert torch.equal(first.reward.readers, second.reward.readers)
    assert not torch.equal(first.reward.readers, other.reward.readers)


def test_every_token_needs_a_state_and_both_sides_of_the_split_texts() -> None:
    data = planted()
    with pytest.raises(InvalidInputError, match="one of each"):
        replace(data, tokens=data.tokens[1:])
    with pytest.raises(InvalidInputError, match="0 are held out"):
        replace(data, held_out=torch.zeros(TEXTS, dtype=torch.bool))
