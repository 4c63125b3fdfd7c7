"""Sparse emissions whose stored values do not sum to 1: every product applies the derived scale."""

import torch
from torch import Tensor

from foretrace.hmm import SparseEmission
from tiny import simplex, sparse_emission

VOCAB, STATES = 30, 5


def unnormalized_emission() -> tuple[SparseEmission, Tensor]:
    """Return an emission with values of the wrong size for each state, and its table: (V, h)."""
    exact = sparse_emission(VOCAB, STATES, share=0.2, seed=3)
    factors = torch.linspace(0.5, 2.0, STATES, dtype=torch.float64)
    values = exact.values * factors[exact.states.long()]
    emission = SparseEmission(exact.offsets, exact.states, values, exact.background, exact.leak)
    return emission, exact.of_tokens(torch.arange(VOCAB))


def test_the_scale_applies_to_entries_and_not_to_the_background() -> None:
    emission, table = unnormalized_emission()
    beliefs = simplex(4, STATES, seed=1)
    torch.testing.assert_close(emission.of_tokens(torch.arange(VOCAB)), table)
    torch.testing.assert_close(emission.predict(beliefs), beliefs @ table.T)
    torch.testing.assert_close(emission.predict(beliefs[:1]), beliefs[:1] @ table.T)
    for block, product in emission.predict_blocks(beliefs.T, 7):
        torch.testing.assert_close(product, table[block] @ beliefs.T)


def test_the_scale_applies_to_selected_tokens() -> None:
    emission, table = unnormalized_emission()
    beliefs, tokens = simplex(4, STATES, seed=1), torch.tensor([0, 3, 17, 29])
    subset = emission.subset(tokens)
    torch.testing.assert_close(
        subset.block(slice(0, 4)).predict(beliefs.T), table[tokens] @ beliefs.T
    )
    values = torch.rand(2, len(tokens), dtype=torch.float64)
    torch.testing.assert_close(emission.expect(values, tokens), values @ table[tokens])
