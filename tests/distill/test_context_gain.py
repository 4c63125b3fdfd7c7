"""What a prefix is worth: checked against sums over all sequences."""

from itertools import product
from math import log

import pytest
import torch

from foretrace.distill.context_gain import memory_gain
from foretrace.hmm import HMM


def probability(hmm: HMM, tokens: tuple[int, ...]) -> float:
    return float(hmm.log_likelihood(torch.tensor([tokens])).double().exp()) if tokens else 1.0


def test_gain_is_what_enumeration_says() -> None:
    """log p(next | prefix) - log p(next | some prefix that does not end), over all prefixes."""
    hmm = HMM.random(3, 4, eos_token_id=0, seed=1, dtype=torch.float64)
    rows = torch.tensor([[1, 2, 3, 1], [3, 3, 2, 0], [2, 1, 1, 1], [1, 0, 0, 0]])
    spoken = list(product((1, 2, 3), repeat=2))
    anything = sum(probability(hmm, prefix) for prefix in spoken)
    for ahead in (1, 2):
        expected = []
        for row in rows[:3].tolist():  # the last row ends within the prefix
            prefix, after = tuple(row[:2]), tuple(row[2 : 2 + ahead])
            known = probability(hmm, prefix + after) / probability(hmm, prefix)
            unknown = sum(probability(hmm, other + after) for other in spoken) / anything
            expected.append(log(known / unknown))
        gain = memory_gain(hmm, rows, prefix=2, ahead=(ahead,))
        assert gain[ahead] == pytest.approx(sum(expected) / 3, abs=1e-10)


def test_a_state_that_tells_nothing_gains_nothing() -> None:
    hmm = HMM(torch.ones(2) / 2, torch.ones(2, 2) / 2, torch.ones(5, 2) / 5)
    gain = memory_gain(hmm, torch.randint(5, (10, 20)))
    assert list(gain) == [1, 2, 4, 8]  # rows of 20 do not reach 16 beyond a prefix of 12
    assert all(abs(nats) < 1e-6 for nats in gain.values())


def test_rows_too_short_to_measure() -> None:
    hmm = HMM.random(2, 5, eos_token_id=0)
    assert memory_gain(hmm, torch.randint(1, 5, (10, 12))) == {}
    assert memory_gain(hmm, torch.zeros(10, 20, dtype=torch.long)) == {}
