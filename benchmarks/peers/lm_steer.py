"""LM-Steer (Han et al. 2024): output embeddings are transformed by a linear map W.

The logit of token v is (e_v + epsilon W e_v) . h, which is the logit of e_v for the last hidden
state h + epsilon W^T h. W has a low rank.

Differences from the paper: W begins at zero, where the paper draws both factors at random and
trains with a small epsilon. The epsilon of the training is 1 here, so that 1 is the strength that
was trained. W is trained for two epochs on as many texts as the experts, in steps of 512 tokens.
The authors' commands have a rank of 1,000 and 1,000 steps of 32 texts, and steer with up to five
times the epsilon of the training.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from foretrace import _io
from foretrace.evaluate import Plugin
from peers.head_fit import Change, FitSettings
from peers.parts import checksum, part, require

MAP = "lm-steer.safetensors"
RANK = 64
SETTINGS = FitSettings(learning_rate=1e-3)


class LowRankMap(Change):
    """W^T as the product of two matrices, (d, rank) and (rank, d).

    Args:
        size: The size d of the last hidden state.
        rank: The rank.
    """

    def __init__(self, size: int, rank: int = RANK) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(size, rank) / size**0.5)
        self.up = nn.Parameter(torch.zeros(rank, size))

    def logits(self, head: Callable[[Tensor], Tensor], hidden: Tensor, factor: Tensor) -> Tensor:
        """Return the logits of steered states."""
        return head(hidden + factor * (hidden @ self.down @ self.up))


def build(
    lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, attribute: str, epsilon: float
) -> Plugin:
    """Build the plug-in.

    Args:
        lm: The language model.
        tokenizer: Its tokenizer.
        attribute: The attribute whose map is used.
        epsilon: The factor of the map.
    """
    file = require(part(attribute, MAP))
    tensors, _ = _io.read_tensors(file)
    down, up = tensors["down"], tensors["up"]

    def steer(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, *others = inputs
        moved = (hidden.float() @ down @ up).to(hidden.dtype)
        return hidden + epsilon * moved, *others

    @contextmanager
    def active() -> Iterator[None]:
        handle = lm.get_output_embeddings().register_forward_pre_hook(steer)
        try:
            yield
        finally:
            handle.remove()

    return Plugin(hook=active, identity=checksum(file))
