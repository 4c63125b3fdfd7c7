"""How well an HMM predicts: n-gram baselines to compare with, and the gain from a prefix."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from foretrace.hmm import HMM, inference
from foretrace.hmm.probability import CHUNK_ELEMENTS

PSEUDOCOUNTS = [10.0**power for power in range(-6, 4)]  # candidates for smoothing
AHEAD = (1, 2, 4, 8, 16)
PREFIX = 12


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


@torch.inference_mode()
def context_gain(
    hmm: HMM, rows: Tensor, *, prefix: int = PREFIX, ahead: tuple[int, ...] = AHEAD
) -> dict[int, float]:
    """Compute the mean gain in log p(next k tokens) from knowing the prefix.

    The baseline is the same HMM that knows only the length of the prefix, and that the text has not
    ended in it.

    Args:
        hmm: The HMM.
        rows: Token ids, (n, T). Rows whose text ends within the prefix are left out.
        prefix: Length of the prefix.
        ahead: The numbers k of tokens to predict. Those that exceed the rows are left out.

    Returns:
        The gain in nats for each k; empty if no row or no k is left.

    Example:
        >>> from foretrace.distill.em.measures import context_gain
        >>> one_state = ft.HMM(torch.ones(1), torch.ones(1, 1), torch.ones(5, 1) / 5)
        >>> context_gain(one_state, torch.ones(3, 14, dtype=torch.long))
        {1: 0.0, 2: 0.0}
    """
    rows = rows.to(hmm.device)
    for token in hmm.config.eos_token_ids:
        rows = rows[(rows[:, :prefix] != token).all(1)]
    ahead = tuple(k for k in ahead if prefix + k <= rows.shape[1])
    if not len(rows) or not ahead:
        return {}
    batch_size = max(1, 8 * CHUNK_ELEMENTS // hmm.num_states)
    gains = [_gains(hmm, batch, prefix, ahead[-1]) for batch in torch.split(rows, batch_size)]
    mean = torch.cat(gains).cumsum(1).mean(0)
    return {k: float(mean[k - 1]) for k in ahead}


def _gains(hmm: HMM, rows: Tensor, prefix: int, ahead: int) -> Tensor:
    """Compute the gain of each of the next tokens of each row: (n, ahead)."""
    predicted = hmm.initial.expand(len(rows), -1)
    for filtered in inference.scan(hmm, rows[:, :prefix]):
        predicted = filtered.predicted
    following = rows[:, prefix : prefix + ahead]
    with_prefix = _log_probabilities(hmm, predicted, following)
    marginal = _marginal_state(hmm, prefix).expand_as(predicted)
    return with_prefix - _log_probabilities(hmm, marginal, following)


def _marginal_state(hmm: HMM, prefix: int) -> Tensor:
    """Compute p(z) after `prefix` unknown tokens that do not end the text: (1, h)."""
    predicted = hmm.initial[None]
    for _ in range(prefix):
        belief = predicted.clone()
        if hmm.config.eos_token_ids:  # the last state, and no other, is the end of text
            belief[:, -1] = 0.0
        predicted = hmm.transition.predict(belief / belief.sum())
    return predicted


def _log_probabilities(hmm: HMM, predicted: Tensor, tokens: Tensor) -> Tensor:
    """Compute log p of each of (n, k) tokens given those before it: (n, k)."""
    log_probabilities = []
    for position in range(tokens.shape[1]):
        filtered = inference.step(hmm, predicted, tokens[:, position])
        predicted = filtered.predicted
        log_probabilities.append(filtered.log_probability)
    return torch.stack(log_probabilities, 1).double()
