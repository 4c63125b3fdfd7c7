"""What a unigram and a bigram of the same corpus reach: the yardstick for an HMM's likelihood."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

ADDED = [10.0**power for power in range(-6, 4)]  # pseudocounts to choose from


@dataclass(frozen=True)
class Baselines:
    """Held-out log-likelihood, in nats per token."""

    unigram: float
    bigram: float


def real_tokens(tokens: Tensor, eos_token_id: int | None) -> Tensor:
    """Mark the tokens of (n, T) rows that are text: all up to and with the first end of text."""
    if eos_token_id is None:
        return torch.ones_like(tokens, dtype=torch.bool)
    ended = (tokens == eos_token_id).cumsum(1)
    return (ended == 0) | ((ended == 1) & (tokens == eos_token_id))


def baselines(
    training: Iterable[Tensor], held_out: Tensor, vocab_size: int, eos_token_id: int | None
) -> Baselines:
    """Count rows once, and score the held-out ones by an add-k unigram and a bigram on top of it.

    The bigram falls back on the unigram: (pair + m p(token)) / (previous + m). k and m are those
    that suit the held-out rows best: the baselines are flattered, not the HMM. Only pairs that
    occur in the held-out rows are counted, so that memory does not grow with the corpus.
    """
    real = real_tokens(held_out, eos_token_id)
    codes = _pairs(held_out, vocab_size)
    wanted = torch.unique(codes[real])  # sorted
    unigram = torch.zeros(vocab_size + 1, dtype=torch.float64)  # the last: starts of rows
    before = torch.zeros(vocab_size + 1, dtype=torch.float64)
    together = torch.zeros(len(wanted), dtype=torch.float64)
    for rows in training:
        text = real_tokens(rows, eos_token_id)
        pairs = _pairs(rows, vocab_size)[text]
        unigram += torch.bincount(rows[text], minlength=vocab_size + 1)
        before += torch.bincount(pairs // vocab_size, minlength=vocab_size + 1)
        place = torch.searchsorted(wanted, pairs).clamp_(max=len(wanted) - 1)
        together += torch.bincount(place[wanted[place] == pairs], minlength=len(wanted))
    pair = torch.searchsorted(wanted, codes[real])
    previous = codes[real] // vocab_size
    alone = _best((unigram[held_out[real]] + k) / (unigram.sum() + k * vocab_size) for k in ADDED)
    joined = _best((together[pair] + m * alone) / (before[previous] + m) for m in ADDED)
    return Baselines(float(alone.log().mean()), float(joined.log().mean()))


def _pairs(tokens: Tensor, vocab_size: int) -> Tensor:
    """Give each pair (previous, token) of (n, T) rows a number; `vocab_size` begins a row."""
    previous = torch.full_like(tokens, vocab_size)
    previous[:, 1:] = tokens[:, :-1]
    return previous * vocab_size + tokens


def _best(candidates: Iterable[Tensor]) -> Tensor:
    """Choose the probabilities of the held-out tokens that are likeliest as a whole."""
    return max(candidates, key=lambda probabilities: float(probabilities.log().sum()))
