"""Control vectors with `repeng`: add a direction to the LM's hidden states."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from types import ModuleType

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from foretrace import _io
from foretrace.evaluate import Plugin
from peers.parts import checksum, inputs_identity, is_made, part, require, write_record
from peers.sides import Sides

VECTOR = "vector.safetensors"
NUM_PAIRS = 1_000
BATCH = 32
METHOD = "mean difference"


def build(
    lm: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    attribute: str,
    coefficient: float,
    layers: Sequence[int],
) -> Plugin:
    """Build the plug-in.

    Args:
        lm: The language model.
        tokenizer: Its tokenizer.
        attribute: The attribute whose vector is used.
        coefficient: The factor of the vector. 1 adds the mean difference of the two sides.
        layers: The first and the last layer that the vector is added to.
    """
    repeng = import_repeng()
    file = require(part(attribute, VECTOR))
    tensors, _ = _io.read_tensors(file)
    directions = {int(layer): direction.numpy() for layer, direction in tensors.items()}
    vector = repeng.ControlVector(lm.config.model_type, directions)
    first, last = layers

    @contextmanager
    def active() -> Iterator[None]:
        controlled = repeng.ControlModel(lm, range(first, last + 1))
        try:
            controlled.set_control(vector, coefficient)
            yield
        finally:
            controlled.unwrap()

    return Plugin(hook=active, identity=checksum(file))


def train_vector(
    lm: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sides: Sides,
    file: Path,
    pairs: int = NUM_PAIRS,
) -> None:
    """Train the vector of an attribute on contrast pairs; nothing if it is there.

    The vector is the mean difference of the hidden states of both texts of a pair, at their last
    token. The principal component, repeng's own method, is for pairs that differ in the attribute
    alone. On pairs of unrelated texts it is the direction of their topics.
    """
    chosen = list(zip(*sides, strict=False))[:pairs]
    inputs = inputs_identity([text for pair in chosen for text in pair], METHOD)
    if is_made(file, inputs):
        return
    start = perf_counter()
    texts, layers = [text for pair in chosen for text in pair], range(lm.config.num_hidden_layers)
    extract = import_repeng().extract
    hidden = extract.batched_get_hiddens(lm, tokenizer, texts, list(layers), BATCH)
    seconds = perf_counter() - start
    tensors = {
        str(layer): torch.from_numpy(states[::2] - states[1::2]).mean(0)
        for layer, states in hidden.items()
    }
    _io.write_tensors(file, tensors, {})
    write_record(file, inputs, seconds, len(texts))


def import_repeng() -> ModuleType:
    """Import repeng, whose annotations name a type that numpy 2 has removed."""
    import numpy

    if not hasattr(numpy, "float_"):
        numpy.float_ = numpy.float64  # type: ignore[attr-defined]
    import repeng

    module: ModuleType = repeng
    return module
