"""The yardsticks, against counting by hand."""

import math

import torch

from foretrace.distill.em.ngram import ADDED, baselines, real_tokens


def test_text_ends_with_its_first_end_of_text() -> None:
    rows = torch.tensor([[5, 0, 0], [0, 0, 0], [5, 6, 7]])
    expected = [[True, True, False], [True, False, False], [True, True, True]]
    assert real_tokens(rows, 0).tolist() == expected
    assert real_tokens(rows, None).all()


def test_unigram_and_bigram_by_hand() -> None:
    training = [torch.tensor([[1, 2, 0], [1, 1, 2]]), torch.tensor([[2, 0, 0]])]
    held_out = torch.tensor([[1, 2, 0]])
    found = baselines(training, held_out, vocab_size=4, eos_token_id=0)
    # counted: 1 x3, 2 x3, 0 x2, of 8; 1 begins 2 of 3 rows; 1 -> 2 in 2 of 3; 2 -> 0 in 2 of 2
    unigram = max(sum(math.log((c + k) / (8 + 4 * k)) for c in (3, 3, 2)) / 3 for k in ADDED)
    k = max(ADDED, key=lambda k: sum(math.log((c + k) / (8 + 4 * k)) for c in (3, 3, 2)))
    alone = [(c + k) / (8 + 4 * k) for c in (3, 3, 2)]
    pairs = ((2, 3), (2, 3), (2, 2))
    bigram = max(
        sum(math.log((c + m * p) / (n + m)) for (c, n), p in zip(pairs, alone, strict=True)) / 3
        for m in ADDED
    )
    assert math.isclose(found.unigram, unigram, rel_tol=1e-12)
    assert math.isclose(found.bigram, bigram, rel_tol=1e-12)


def test_a_bigram_source_is_seen_as_one() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 50, (500, 1), generator=generator)
    steps = torch.arange(20) * 7
    rows = (rows + steps) % 50  # each token tells the next
    found = baselines([rows[100:]], rows[:100], 50, None)
    assert abs(found.unigram + math.log(50)) < 0.05
    assert found.bigram > -0.3
