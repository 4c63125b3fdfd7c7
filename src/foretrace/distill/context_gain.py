"""Context gain: how much a prefix helps an HMM to predict the tokens that follow it."""

import torch
from torch import Tensor

from foretrace.hmm import HMM, inference
from foretrace.hmm.probability import CHUNK_ELEMENTS

AHEAD = (1, 2, 4, 8, 16)
PREFIX = 12


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
        >>> from foretrace.distill.context_gain import context_gain
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
