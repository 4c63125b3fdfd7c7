"""N-gram baselines equal counts by hand."""

import math

import torch

from foretrace.distill.em.ngram import PSEUDOCOUNTS, ngram_baselines, text_mask


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
