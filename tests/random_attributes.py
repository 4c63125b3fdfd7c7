"""Files of attributes with random weights, for tests of servers."""

from pathlib import Path

import torch

from foretrace.attribute import Attribute


def write_random(
    folder: Path, name: str, vocab_size: int, *, share: float, known: str | None, seed: int
) -> None:
    """Write an attribute with weights for a share of the tokens.

    `known` is the fingerprint of the tokenizer.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(vocab_size, generator=generator)
    weights[torch.rand(vocab_size, generator=generator) > share] = 1.0
    Attribute.from_weights(weights, tokenizer_fingerprint=known).save(
        folder / f"{name}.safetensors"
    )
