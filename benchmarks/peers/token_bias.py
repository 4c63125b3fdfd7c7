"""A bias for every token, whatever the context: a soft list of good and bad words.

It is fitted by the likelihood objective of LM-Steer.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from foretrace import _io
from foretrace.evaluate import Plugin
from foretrace.evaluate.plugin import LogitsProcessor, Prompts
from peers.head_fit import Change, FitSettings
from peers.parts import checksum, part, require

BIAS = "token-bias.safetensors"
SETTINGS = FitSettings(learning_rate=0.02)


class TokenBias(Change):
    """A number for every token that is added to its logit.

    Args:
        vocabulary: The number of tokens V.
    """

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def logits(self, head: Callable[[Tensor], Tensor], hidden: Tensor, factor: Tensor) -> Tensor:
        """Return the logits with the bias."""
        with torch.no_grad():  # the LM's logits do not depend on the bias
            bare = head(hidden)
        return bare + factor * self.bias


def build(
    lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, attribute: str, epsilon: float
) -> Plugin:
    """Build the plug-in.

    Args:
        lm: The language model.
        tokenizer: Its tokenizer.
        attribute: The attribute whose bias is used.
        epsilon: The factor of the bias.
    """
    file = require(part(attribute, BIAS))
    bias = _io.read_tensors(file)[0]["bias"]

    def processor(prompts: Prompts) -> LogitsProcessor:
        return lambda ids, logits: logits + epsilon * bias

    return Plugin(processor=processor, identity=checksum(file))
