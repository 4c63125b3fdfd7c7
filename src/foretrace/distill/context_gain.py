"""What an HMM knows of the future: how much a prefix helps it to foresee what comes later."""

import torch
from torch import Tensor

from foretrace.hmm import HMM, inference
from foretrace.hmm.probability import CHUNK_ELEMENTS

AHEAD = (1, 2, 4, 8, 16)
PREFIX = 12


@torch.inference_mode()
def memory_gain(
    hmm: HMM, rows: Tensor, *, prefix: int = PREFIX, ahead: tuple[int, ...] = AHEAD
) -> dict[int, float]:
    """Give the mean gain in log p(next k tokens) from knowing a prefix, in nats, for each k.

    The comparison is the HMM that knows only how long the prefix is: its state at that place,
    whatever was said. Rows, (n, T), whose text ends within the prefix do not count; if none is
    left, or rows are too short, there is nothing to tell.
    """
    rows = rows.to(hmm.device)
    for token in hmm.config.eos_token_ids:
        rows = rows[(rows[:, :prefix] != token).all(1)]
    ahead = tuple(k for k in ahead if prefix + k <= rows.shape[1])
    if not len(rows) or not ahead:
        return {}
    width = max(1, 8 * CHUNK_ELEMENTS // hmm.num_states)
    parts = [_gains(hmm, part, prefix, ahead[-1]) for part in torch.split(rows, width)]
    gain = torch.cat(parts).cumsum(1).mean(0)
    return {k: float(gain[k - 1]) for k in ahead}


def _gains(hmm: HMM, rows: Tensor, prefix: int, ahead: int) -> Tensor:
    """Give what each of the next tokens of each row gains: (n, ahead)."""
    predicted = hmm.initial.expand(len(rows), -1)
    for filtered in inference.scan(hmm, rows[:, :prefix]):
        predicted = filtered.predicted
    after = rows[:, prefix : prefix + ahead]
    known = _log_probabilities(hmm, predicted, after)
    unknown = _log_probabilities(hmm, _anything(hmm, prefix).expand_as(predicted), after)
    return known - unknown


def _anything(hmm: HMM, prefix: int) -> Tensor:
    """Give p(z) after `prefix` unknown tokens that do not end the text: (1, h)."""
    predicted = hmm.initial[None]
    for _ in range(prefix):
        belief = predicted.clone()
        if hmm.config.eos_token_ids:  # the last state, and it alone, is the end
            belief[:, -1] = 0.0
        predicted = hmm.transition.predict(belief / belief.sum())
    return predicted


def _log_probabilities(hmm: HMM, predicted: Tensor, tokens: Tensor) -> Tensor:
    """Give log p of each of (n, k) tokens, given those before it: (n, k)."""
    found = []
    for position in range(tokens.shape[1]):
        filtered = inference.step(hmm, predicted, tokens[:, position])
        predicted = filtered.predicted
        found.append(filtered.log_probability)
    return torch.stack(found, 1).double()
