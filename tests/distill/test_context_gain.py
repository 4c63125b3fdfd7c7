"""The context gain equals a sum over all sequences."""

from itertools import product
from math import log

import pytest
import torch

from foretrace.distill.context_gain import context_gain
from foretrace.hmm import HMM


def probability(hmm: HMM, tokens: tuple[int, ...]) -> float:
    return float(hmm.log_likelihood(torch.tensor([tokens])).double().exp()) if tokens else 1.0


def test_gain_equals_enumeration() -> None:
    """The gain is log p(next | prefix) - log p(next | any prefix without an end of text)."""
    hmm = HMM.random(3, 4, eos_token_id=0, seed=1, dtype=torch.float64)
    rows = torch.tensor([[1, 2, 3, 1], [3, 3, 2, 0], [2, 1, 1, 1], [1, 0, 0, 0]])
    prefixes = list(product((1, 2, 3), repeat=2))
    total = sum(probability(hmm, prefix) for prefix in prefixes)
    for ahead in (1, 2):
        expected = []
        for row in rows[:3].tolist():  # the last row ends within the prefix
            prefix, following = tuple(row[:2]), tuple(row[2 : 2 + ahead])
            known = probability(hmm, prefix + following) / probability(hmm, prefix)
            unknown = sum(probability(hmm, other + following) for other in prefixes) / total
            expected.append(log(known / unknown))
        gain = context_gain(hmm, rows, prefix=2, ahead=(ahead,))
        assert gain[ahead] == pytest.approx(sum(expected) / 3, abs=1e-10)


def test_an_uninformative_state_gains_nothing() -> None:
    hmm = HMM(torch.ones(2) / 2, torch.ones(2, 2) / 2, torch.ones(5, 2) / 5)
    gain = context_gain(hmm, torch.randint(5, (10, 20)))
    assert list(gain) == [1, 2, 4, 8]  # rows of 20 tokens end before 16 after a prefix of 12
    assert all(abs(nats) < 1e-6 for nats in gain.values())


def test_rows_that_are_too_short() -> None:
    hmm = HMM.random(2, 5, eos_token_id=0)
    assert context_gain(hmm, torch.randint(1, 5, (10, 12))) == {}
    assert context_gain(hmm, torch.zeros(10, 20, dtype=torch.long)) == {}
