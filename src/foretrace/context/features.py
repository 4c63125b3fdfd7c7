"""Features of tokens: the rows of an LM's head in their principal directions."""

import torch
from torch import Tensor

from foretrace.context.head import CHUNK, Head
from foretrace.errors import InvalidInputError

MAX_EMBEDDING = 1024


def token_embeddings(head: Head) -> Tensor:
    """Return an embedding of each token, to fit attributes with: (V, k) float16.

    It is the token's row of the head, whitened, in at most 1,024 principal directions. Tokens that
    the head excludes, such as ends of text, are zero.

    Args:
        head: The head of an LM, with its excluded tokens.

    Example:
        >>> from foretrace.context import Head, token_embeddings
        >>> token_embeddings(Head.of_model(model, tokenizer)).shape
        torch.Size([374, 32])
    """
    table, *_ = token_features(head, MAX_EMBEDDING)
    table[[token for token in head.excluded if token < len(table)]] = 0.0
    return table


def token_features(head: Head, count: int) -> tuple[Tensor, Tensor, float]:
    """Return whitened features of all tokens, (V, k) float16, their basis and the kept variance.

    Every feature has mean 0 and variance 1, and k is at most d. The basis, (d, k) float32, has the
    principal directions, each times the standard deviation along it. The kept variance is a share
    of the rows' total variance.
    """
    vocab_size, width = head.weight.shape
    if count < 1:
        raise InvalidInputError(f"A probe has at least 1 feature of each token, not {count}.")
    count = min(count, width)
    mean = torch.stack([rows.float().sum(0) for rows in torch.split(head.weight, CHUNK)]).sum(0)
    mean = mean / vocab_size
    covariance = torch.zeros(width, width, dtype=torch.float64, device=head.weight.device)
    for rows in torch.split(head.weight, CHUNK):
        centred = rows.float() - mean
        covariance += centred.T @ centred
    variances, directions = torch.linalg.eigh(covariance / vocab_size)
    kept = float(variances[-count:].sum() / variances.sum())
    top, deviations = (
        directions[:, -count:].flip(1),
        variances[-count:].flip(0).clamp_min(1e-30).sqrt(),
    )
    largest = top.gather(0, top.abs().argmax(0, keepdim=True))  # fixes the sign of a direction
    top = top * largest.sign()
    scaled = (top / deviations).float()
    parts = [((rows.float() - mean) @ scaled).half() for rows in torch.split(head.weight, CHUNK)]
    return torch.cat(parts).cpu(), (top * deviations).float().cpu(), kept
