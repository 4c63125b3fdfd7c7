"""Choose the tokens of a probe: rare in texts, and with rows that span all directions."""

import torch
from torch import Tensor

from foretrace.context.head import CHUNK, Head
from foretrace.errors import InvalidInputError

POOL = 4  # rare tokens to choose from, per token that is chosen
FULL_SIZE = 8192


def choose_tokens(head: Head) -> Tensor:
    """Return the ids of the tokens to read, ascending: (m,).

    There are four tokens for each dimension of the hidden state, or two if four would be more
    than 8,192. The highest ids of a vocabulary are its rarest tokens, because tokenizers add the
    most frequent merges first. Of these, the choice takes the tokens with the highest statistical
    leverage, which takes two products with the pool's rows. Pivoted QR needs far longer for the
    same condition number.
    """
    vocab_size, width = head.weight.shape
    allowed = torch.ones(vocab_size, dtype=torch.bool)
    allowed[[token for token in head.excluded if token < vocab_size]] = False
    candidates = allowed.nonzero()[:, 0]
    size = min(4 * width, max(2 * width, FULL_SIZE), len(candidates))
    if size < width + max(2, width // 4):
        raise InvalidInputError(
            f"The vocabulary has {len(candidates)} tokens that a probe can use, too few to compute "
            f"{width} numbers of a hidden state. A probe needs a vocabulary that is a quarter "
            f"larger than the hidden state."
        )
    pool = candidates[-POOL * size :]
    return pool[_leverage(head.weight, pool).topk(size).indices].sort().values


def _leverage(weight: Tensor, pool: Tensor) -> Tensor:
    """Return the leverage of each row of the pool: its weight in a least-squares fit to all."""
    rows = weight[pool.to(weight.device)].float()
    rows = rows - rows.mean(0)
    gram = (rows.T @ rows).double()
    ridge = 1e-9 * gram.diagonal().mean() * torch.eye(len(gram), device=gram.device)
    factor = torch.linalg.cholesky(gram + ridge).float()
    parts = torch.split(rows, CHUNK)
    solved = [torch.linalg.solve_triangular(factor, part.T, upper=False) for part in parts]
    return torch.cat([part.square().sum(0) for part in solved]).cpu()
