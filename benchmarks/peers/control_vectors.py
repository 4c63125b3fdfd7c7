"""Control vectors with `repeng`: add a direction to the LM's hidden states."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from time import perf_counter
from types import ModuleType

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from foretrace import _io
from foretrace.engines.transformers.batch import model_inputs
from foretrace.evaluate import Plugin
from peers.lora import IGNORED, pad_right
from peers.parts import checksum, inputs_identity, is_made, part, require, write_record
from peers.sides import Sides

VECTOR = "vector.safetensors"
NUM_PAIRS = 1_000
BATCH = 32
LONGEST = 64  # tokens of a text, as for experts
METHOD = "mean difference"
RANGES = ((1 / 6, 1 / 2), (1 / 3, 2 / 3), (1 / 2, 5 / 6))  # of all layers, to choose from
TRIED = (0.1, 0.2, 0.4)  # coefficients
HELD_OUT = 32  # pairs


def build(
    lm: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    attribute: str,
    coefficient: float,
    layers: Sequence[int] | None = None,
) -> Plugin:
    """Build the plug-in.

    Args:
        lm: The language model.
        tokenizer: Its tokenizer.
        attribute: The attribute whose vector is used.
        coefficient: The factor of the vector. 1 adds the mean difference of the two sides.
        layers: The first and the last layer that the vector is added to. By default, those that
            were chosen on held-out texts when the vector was made.
    """
    file = require(part(attribute, VECTOR))
    directions, metadata = _io.read_tensors(file)
    first, last = json.loads(metadata["layers"]) if layers is None else layers

    def active() -> AbstractContextManager[None]:
        return control(lm, directions, (first, last), coefficient)

    return Plugin(hook=active, identity=checksum(file))


@contextmanager
def control(
    lm: PreTrainedModel,
    directions: Mapping[str, Tensor],
    layers: tuple[int, int],
    coefficient: float,
) -> Iterator[None]:
    """Add directions to the hidden states of layers, from the first to the last."""
    repeng = import_repeng()
    vectors = {int(layer): direction.numpy() for layer, direction in directions.items()}
    controlled = repeng.ControlModel(lm, range(layers[0], layers[1] + 1))
    try:
        vector = repeng.ControlVector(lm.config.model_type, vectors)
        controlled.set_control(vector, coefficient)
        yield
    finally:
        controlled.unwrap()


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
    alone. On pairs of unrelated texts it is the direction of their topics. The layers are chosen on
    the last pairs, which the vector is not made from.
    """
    chosen = list(zip(*sides, strict=False))[:pairs]
    texts = [text for pair in chosen for text in pair]
    inputs = inputs_identity(texts, (METHOD, LONGEST, RANGES, TRIED, HELD_OUT))
    if is_made(file, inputs):
        return
    start = perf_counter()
    cut = [str(tokenizer.decode(ids[:LONGEST])) for ids in tokenizer(texts).input_ids]
    held_out = 2 * min(HELD_OUT, len(chosen) // 4)
    layers = list(range(lm.config.num_hidden_layers))
    extract = import_repeng().extract
    hidden = extract.batched_get_hiddens(lm, tokenizer, cut[:-held_out], layers, BATCH)
    directions = {
        str(layer): torch.from_numpy(states[::2] - states[1::2]).mean(0)
        for layer, states in hidden.items()
    }
    likelihoods = measure_ranges(lm, tokenizer, directions, cut[-held_out:])
    best = max(likelihoods, key=lambda layers: likelihoods[layers])
    metadata = {"layers": json.dumps(best), "likelihoods": json.dumps([*likelihoods.items()])}
    _io.write_tensors(file, directions, metadata)
    write_record(file, inputs, perf_counter() - start, len(texts))


def measure_ranges(
    lm: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    directions: Mapping[str, Tensor],
    texts: Sequence[str],
) -> dict[tuple[int, int], float]:
    """Measure by likelihood how well each range of layers tells the sides of texts apart.

    The likelihood is that of LM-Steer: of texts with the attribute with a coefficient c, and of
    texts without it with -c, for the best c of those that are tried.

    Args:
        lm: The language model.
        tokenizer: Its tokenizer.
        directions: The vector.
        texts: Texts with the attribute and texts without it, in turns.

    Returns:
        The mean log-likelihood in nats per token, by the first and the last layer.
    """
    count = lm.config.num_hidden_layers
    ranges = [(round(start * count), min(round(end * count), count - 1)) for start, end in RANGES]
    measured = {}
    for layers in ranges:
        sums = []
        for coefficient in TRIED:
            total = 0.0
            for side, signed in ((texts[::2], coefficient), (texts[1::2], -coefficient)):
                with control(lm, directions, layers, signed):
                    total += mean_log_likelihood(lm, tokenizer, side) / 2
            sums.append(total)
        measured[layers] = max(sums)
    return measured


@torch.no_grad()
def mean_log_likelihood(
    lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]
) -> float:
    """Return the mean log-likelihood of the tokens of texts after their first, in nats."""
    ids, mask = pad_right(tokenizer(list(texts)).input_ids)
    labels = ids.masked_fill(mask == 0, IGNORED)
    return -float(lm(**model_inputs(ids, mask, lm.device), labels=labels).loss)


def import_repeng() -> ModuleType:
    """Import repeng, whose annotations name a type that numpy 2 has removed."""
    import numpy

    if not hasattr(numpy, "float_"):
        numpy.float_ = numpy.float64  # type: ignore[attr-defined]
    import repeng

    module: ModuleType = repeng
    return module
