"""N-gram baselines equal counts by hand; the context gain equals a sum over all sequences."""

import math
from itertools import product

import pytest
import torch

from foretrace.distill.em.measures import PSEUDOCOUNTS, context_gain, ngram_baselines, text_mask
from foretrace.hmm import HMM


def test_a_text_ends_at_its_first_end_of_text_token() -> None:
    rows = torch.tensor([[5, 0, 0], [0, 0, 0], [5, 6, 7]])
    expected = [[True, True, False], [True, False, False], [True, True, True]]
    assert text_mask(rows, 0).tolist() == expected
    assert text_mask(rows, None).all()


def test_unigram_and_bigram_by_hand() -> None:
    training = [torch.tensor([[1, 2, 0], [1, 1, 2]]), torch.tensor([[2, 0, 0]])]
    held_out = torch.tensor([[1, 2, 0]])
    baselines = ngram_baselines(training, held_out, vocab_size=4, eos_token_id=0)
    # counts: 1 x3, 2 x3, 0 x2, of 8; 1 begins 2 of 3 rows; 1 -> 2 in 2 of 3; 2 -> 0 in 2 of 2
    unigram = max(sum(math.log((c + k) / (8 + 4 * k)) for c in (3, 3, 2)) / 3 for k in PSEUDOCOUNTS)
    k = max(PSEUDOCOUNTS, key=lambda k: sum(math.log((c + k) / (8 + 4 * k)) for c in (3, 3, 2)))
    unigrams = [(c + k) / (8 + 4 * k) for c in (3, 3, 2)]
    pairs = ((2, 3), (2, 3), (2, 2))
    bigram = max(
        sum(math.log((c + m * p) / (n + m)) for (c, n), p in zip(pairs, unigrams, strict=True)) / 3
        for m in PSEUDOCOUNTS
    )
    assert math.isclose(baselines.unigram, unigram, rel_tol=1e-12)
    assert math.isclose(baselines.bigram, bigram, rel_tol=1e-12)


def test_the_bigram_predicts_a_bigram_source() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 50, (500, 1), generator=generator)
    steps = torch.arange(20) * 7
    rows = (rows + steps) % 50  # each token determines the next
    baselines = ngram_baselines([rows[100:]], rows[:100], 50, None)
    assert abs(baselines.unigram + math.log(50)) < 0.05
    assert baselines.bigram > -0.3


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
            expected.append(math.log(known / unknown))
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
