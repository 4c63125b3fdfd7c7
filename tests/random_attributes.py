"""Files of attributes with random weights, for tests of servers."""

from dataclasses import replace
from pathlib import Path

import torch

from foretrace.attribute import Attribute, ContextReward
from foretrace.attribute.terms import Terms
from foretrace.context import Probe


def write_random(
    folder: Path, name: str, vocab_size: int, *, share: float, known: str | None, seed: int
) -> None:
    """Write an attribute with weights for a share of the tokens.

    `known` is the fingerprint of the tokenizer. The attribute is calibrated: a server does not have
    to find the strengths of its levels.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(vocab_size, generator=generator)
    weights[torch.rand(vocab_size, generator=generator) > share] = 1.0
    attribute = Attribute.from_weights(weights, tokenizer_fingerprint=known)
    config = replace(attribute.config, levels={"mild": 1.0, "medium": 2.0, "strong": 4.0})
    replace(attribute, config=config).save(folder / f"{name}.safetensors")


def random_context(probe: Probe, rank: int = 4, seed: int = 0) -> Attribute:
    """Return an attribute with a random context reward alone, for the LM of a probe."""
    generator, width = torch.Generator().manual_seed(seed), len(probe.inverse)
    readers = 0.1 * torch.randn(rank, width + 1, generator=generator)
    writers = 0.1 * torch.randn(rank, width, generator=generator)
    context = ContextReward(readers, writers, probe.config.fingerprint)
    return Attribute(Terms.one(), context=context)
