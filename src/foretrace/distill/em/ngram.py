"""Unigram and bigram baselines: log-likelihoods to compare the HMM of a corpus with."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

PSEUDOCOUNTS = [10.0**power for power in range(-6, 4)]  # candidates for smoothing


@dataclass(frozen=True)
class Baselines:
    """Held-out log-likelihood of n-gram models.

    Attributes:
        unigram: Of the unigram model, in nats per token.
        bigram: Of the bigram model, in nats per token.
    """

    unigram: float
    bigram: float


def text_mask(tokens: Tensor, eos_token_id: int | None) -> Tensor:
    """Mark the tokens of (n, T) rows up to and including the first end-of-text token."""
    if eos_token_id is None:
        return torch.ones_like(tokens, dtype=torch.bool)
    ended = (tokens == eos_token_id).cumsum(1)
    return (ended == 0) | ((ended == 1) & (tokens == eos_token_id))


def ngram_baselines(
    training: Iterable[Tensor], held_out: Tensor, vocab_size: int, eos_token_id: int | None
) -> Baselines:
    """Score the held-out rows by an add-k unigram, and by a bigram that backs off to it.

    The bigram is (pair + m p(token)) / (previous + m). k and m are the values that fit the held-out
    rows best, which favours the baselines over the HMM. Only pairs that occur in the held-out rows
    are counted, so that memory does not grow with the corpus.
    """
    mask = text_mask(held_out, eos_token_id)
    held_out_pairs = _pair_ids(held_out, vocab_size)[mask]
    distinct_pairs = torch.unique(held_out_pairs)  # sorted
    token_counts = torch.zeros(vocab_size + 1, dtype=torch.float64)  # the last: starts of rows
    previous_counts = torch.zeros(vocab_size + 1, dtype=torch.float64)
    pair_counts = torch.zeros(len(distinct_pairs), dtype=torch.float64)
    for rows in training:
        row_mask = text_mask(rows, eos_token_id)
        pairs = _pair_ids(rows, vocab_size)[row_mask]
        token_counts += torch.bincount(rows[row_mask], minlength=vocab_size + 1)
        previous_counts += torch.bincount(pairs // vocab_size, minlength=vocab_size + 1)
        index = torch.searchsorted(distinct_pairs, pairs).clamp_(max=len(distinct_pairs) - 1)
        known = index[distinct_pairs[index] == pairs]
        pair_counts += torch.bincount(known, minlength=len(distinct_pairs))
    pair_index = torch.searchsorted(distinct_pairs, held_out_pairs)
    previous = held_out_pairs // vocab_size
    unigram = _most_likely(
        (token_counts[held_out[mask]] + k) / (token_counts.sum() + k * vocab_size)
        for k in PSEUDOCOUNTS
    )
    bigram = _most_likely(
        (pair_counts[pair_index] + m * unigram) / (previous_counts[previous] + m)
        for m in PSEUDOCOUNTS
    )
    return Baselines(float(unigram.log().mean()), float(bigram.log().mean()))


def _pair_ids(tokens: Tensor, vocab_size: int) -> Tensor:
    """Encode each pair (previous, token) of (n, T) rows; `vocab_size` precedes the first token."""
    previous = torch.full_like(tokens, vocab_size)
    previous[:, 1:] = tokens[:, :-1]
    return previous * vocab_size + tokens


def _most_likely(candidates: Iterable[Tensor]) -> Tensor:
    """Return the candidate with the largest sum of log-probabilities over the held-out tokens."""
    return max(candidates, key=lambda probabilities: float(probabilities.log().sum()))
