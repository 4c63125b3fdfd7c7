"""Attributes of random weights, written as files: for servers that need many."""

from pathlib import Path

import torch

from foretrace.attribute import Attribute


def write_random(
    folder: Path, name: str, vocab_size: int, *, share: float, known: str | None, seed: int
) -> None:
    """Write one that weighs a share of the tokens; `known` is the tokenizer's fingerprint."""
    numbers = torch.Generator().manual_seed(seed)
    weights = torch.rand(vocab_size, generator=numbers)
    weights[torch.rand(vocab_size, generator=numbers) > share] = 1.0
    Attribute.from_weights(weights, tokenizer_fingerprint=known).save(
        folder / f"{name}.safetensors"
    )
