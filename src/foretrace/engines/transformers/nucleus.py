"""Sampling of next tokens by top-p, with random numbers that belong to tokens.

Every token x has a random number g(x), and the token with the largest log p(x) + g(x) is drawn
(Gumbel-max): the token x with probability p(x). The numbers depend on the step, the row and the
token alone. Two methods that continue the same prompts with the same seed therefore draw the same
token where their distributions are alike, so that differences between them have less noise.
"""

from math import log
from typing import NamedTuple

import torch
from torch import Tensor

from foretrace.errors import InvalidInputError
from foretrace.steering.price import CACHED_ELEMENTS, row_blocks

TOP_K = 1024  # the nucleus of most rows is among so many tokens
TOP_K_OF_WIDE = 8192  # and that of most other rows among these
_WORD = 0xFFFFFFFF  # 32 bits


class NextTokens(NamedTuple):
    """Tokens that were drawn.

    Attributes:
        tokens: The token ids, (n,).
        log_probability: Their log-probabilities within the nucleus, (n,).
    """

    tokens: Tensor
    log_probability: Tensor


def draw_nucleus(
    logits: Tensor, top_p: float, generator: torch.Generator | None = None
) -> NextTokens:
    """Sample from the smallest set of the most probable tokens with probability `top_p`.

    The result is exact: rows whose nucleus has more than TOP_K tokens are sorted again, the widest
    of them whole. It takes two random numbers of the generator per row, whatever the logits are.

    Args:
        logits: Logits of the next token, (n, V).
        top_p: The probability of the nucleus. With 1 or more, it is the whole vocabulary.
        generator: The generator of random numbers; None for PyTorch's own.

    Returns:
        The tokens.

    Raises:
        InvalidInputError: If a row has no finite logit, or one that is not a number.

    Example:
        >>> from foretrace.engines.transformers.nucleus import draw_nucleus
        >>> drawn = draw_nucleus(torch.tensor([[9.0, 0.0, 0.0]]), top_p=0.9)
        >>> drawn.tokens.tolist(), drawn.log_probability.tolist()
        ([0], [0.0])
    """
    keys = torch.randint(
        _WORD + 1, (len(logits), 2), generator=generator, device=logits.device, dtype=torch.long
    )
    total = log_totals(logits)
    if not bool(total.isfinite().all()):
        row = int((~total.isfinite()).nonzero()[0, 0])
        raise InvalidInputError(
            f"No token can be drawn for row {row}: its logits are infinite or not numbers. float16 "
            f"overflows with some models: load the model in bfloat16 or float32."
        )
    top, tokens = logits.topk(min(TOP_K, logits.shape[1]))
    log_p = top.float() - total
    if top_p >= 1:
        return _draw_all(logits, log_p, tokens, keys, total)
    drawn = _draw_sorted(log_p, tokens, keys, top_p)
    wide = (log_p.exp().sum(-1) < top_p).nonzero()[:, 0]
    for size in (TOP_K_OF_WIDE, logits.shape[1]):
        if not len(wide):
            break
        top, tokens = logits[wide].topk(min(size, logits.shape[1]))
        log_p = top.float() - total[wide]
        redrawn = _draw_sorted(log_p, tokens, keys[wide], top_p)
        for result, corrected in zip(drawn, redrawn, strict=True):
            result[wide] = corrected
        wide = wide[log_p.exp().sum(-1) < top_p]
    return drawn


def log_totals(logits: Tensor) -> Tensor:
    """Compute the logarithm of the sum of exp(logits): (n, V) -> (n, 1) float32.

    Args:
        logits: Logits. On a CPU, they are read in blocks that fit its caches.

    Returns:
        The logarithms.

    Example:
        >>> from foretrace.engines.transformers.nucleus import log_totals
        >>> log_totals(torch.zeros(1, 4)).exp()
        tensor([[4.]])
    """
    elements = CACHED_ELEMENTS if logits.device.type == "cpu" else None
    blocks = row_blocks(logits, elements)
    totals = [logits[rows].float().logsumexp(-1, keepdim=True) for rows in blocks]
    return torch.cat(totals) if totals else logits.new_zeros(0, 1).float()


def token_nats(logits: Tensor, tokens: Tensor) -> Tensor:
    """Compute the negative log-probability of tokens: (n, V) logits, (n,) ids -> (n,)."""
    return (log_totals(logits) - logits.gather(-1, tokens[:, None]))[:, 0]


def _draw_sorted(log_p: Tensor, tokens: Tensor, keys: Tensor, top_p: float) -> NextTokens:
    """Draw one of tokens in descending order while the mass before it is below `top_p`."""
    probability = log_p.exp()
    outside = probability.cumsum(-1) - probability >= top_p
    size = int((~outside).sum(-1).max())  # random numbers are expensive
    nucleus = log_p.masked_fill(outside, -torch.inf).log_softmax(-1)
    return _race(nucleus[:, :size], tokens[:, :size], keys)


def _draw_all(
    logits: Tensor, log_p: Tensor, tokens: Tensor, keys: Tensor, total: Tensor
) -> NextTokens:
    """Draw one of all tokens. Those that are not among the first are one choice at first."""
    vocab_size = logits.shape[1]
    if tokens.shape[1] == vocab_size:
        return _race(log_p, tokens, keys)
    rest = (1 - log_p.exp().sum(-1, keepdim=True)).clamp_min(0.0).log()
    # A sum that is rounded leaves a rest where none of the other tokens is possible.
    rest = rest.minimum(log_p[:, -1:] + log(vocab_size - tokens.shape[1]))
    others = tokens.new_full((len(tokens), 1), vocab_size)
    drawn = _race(torch.cat([log_p, rest], 1), torch.cat([tokens, others], 1), keys)
    is_rest = drawn.tokens == vocab_size
    if bool(is_rest.any()):
        others = logits[is_rest].float().scatter(1, tokens[is_rest], -torch.inf) - total[is_rest]
        ids = torch.arange(vocab_size, device=tokens.device).expand_as(others)
        for result, corrected in zip(drawn, _race(others, ids, keys[is_rest]), strict=True):
            result[is_rest] = corrected
    return drawn


def _race(log_p: Tensor, tokens: Tensor, keys: Tensor) -> NextTokens:
    """Draw a token of each row: (n, k) log-probabilities up to a constant, (n, k) ids."""
    won = (log_p + _gumbel(tokens, keys)).argmax(-1, keepdim=True)
    return NextTokens(tokens.gather(1, won)[:, 0], log_p.gather(1, won)[:, 0])


def _gumbel(tokens: Tensor, keys: Tensor) -> Tensor:
    """Return a Gumbel-distributed number for each token: (n, k), (n, 2) -> (n, k) float64."""
    bits = _mixed(_mixed(tokens + keys[:, :1]) ^ keys[:, 1:])
    uniform = (bits.double() + 0.5) / (_WORD + 1)
    return uniform.log_().neg_().log_().neg_()


def _mixed(bits: Tensor) -> Tensor:
    """Mix the lower 32 bits of integers, so that each bit depends on all others."""
    bits = bits & _WORD
    bits = bits ^ (bits >> 16)
    bits = (bits * 0x7FEB352D) & _WORD
    bits = bits ^ (bits >> 15)
    bits = (bits * 0x846CA68B) & _WORD
    return bits ^ (bits >> 16)
