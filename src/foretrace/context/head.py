"""The head of an LM: the matrix, and what follows it, that make logits of the last hidden state."""

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from foretrace.errors import InvalidInputError

CHUNK = 8192  # rows of the head that are converted to float32 at once
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
MULTIPLY_BY_DIVISOR = "hyperclovax"  # its `logits_scaling` is a factor


@dataclass(frozen=True)
class Head:
    """The head of an LM: logits = cap(scale * (weight @ h + bias)), cap(z) = c * tanh(z / c).

    Attributes:
        weight: (V, d), in any floating-point type.
        bias: (V,); None if the head has none.
        scale: The factor of all logits.
        softcap: The bound c of the logits; None if they have none.
        excluded: Tokens that no probe may use: special, added and single-character ones.

    Example:
        >>> from foretrace.context import Head
        >>> Head.of_model(model).weight.shape
        torch.Size([374, 32])
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    excluded: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        shape, kind = tuple(self.weight.shape), self.weight.dtype
        if len(shape) != 2 or not kind.is_floating_point or kind.itemsize < 2:
            raise InvalidInputError(
                f"The weight of the head has shape {shape} and type {kind}, but a matrix of 16-bit "
                f"floating-point numbers or wider was expected. Pass the LM with a head that is "
                f"not quantised, or its GGUF file."
            )
        if not 0 < self.scale < float("inf"):
            raise InvalidInputError(f"The scale of logits is {self.scale}; it must be positive.")

    @classmethod
    def of_model(cls, model: Any, tokenizer: Any = None) -> "Head":
        """Return the head of a model of transformers, tied to its embeddings or not.

        Args:
            model: A `PreTrainedModel`.
            tokenizer: Its tokenizer, to build a probe: without it, only the tokens that begin, end
                and pad texts are excluded.
        """
        layer = model.get_output_embeddings()
        if layer is None:
            raise InvalidInputError(
                f"{type(model).__name__} has no output embeddings. Pass a causal language model."
            )
        bias = getattr(layer, "bias", None)
        config = model.config.to_dict()
        vocabulary, special = {}, special_ids(config)
        if tokenizer is not None:
            vocabulary = tokenizer.get_vocab()
            special |= {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        scale, softcap = logit_transform(config)
        bias = None if bias is None else bias.detach()
        excluded = unsuitable_tokens(vocabulary, special)
        return cls(layer.weight.detach(), bias, scale, softcap, excluded)

    def logits(self, states: Tensor) -> Tensor:
        """Compute the logits of (n, d) hidden states, in float32: (n, V)."""
        parts = [states.float() @ rows.float().T for rows in torch.split(self.weight, CHUNK)]
        logits = torch.cat(parts, 1)
        return self.transform(logits if self.bias is None else logits + self.bias.float())

    def transform(self, products: Tensor) -> Tensor:
        """Scale and cap products of the matrix."""
        scaled = products * self.scale
        return scaled if self.softcap is None else self.softcap * (scaled / self.softcap).tanh()

    @cached_property
    def fingerprint(self) -> str:
        """The SHA-256 of weight and bias, rounded to bfloat16, of the scale and of the cap.

        It identifies the function from hidden states to logits. The type in which an LM is stored
        or loaded does not change it, unless it has fewer digits than bfloat16. A quantised head has
        another one than the head it was made of, because its logits are others.
        """
        digest = hashlib.sha256(struct.pack("<dd", self.scale, self.softcap or 0.0))
        for tensor in (self.weight, self.bias):
            digest.update(b"|")
            for rows in () if tensor is None else torch.split(tensor, CHUNK):
                values = rows.bfloat16().float().cpu().contiguous() + 0.0  # -0.0 becomes 0.0
                digest.update(values.numpy().astype("<f4", copy=False).data)
        return f"sha256:{digest.hexdigest()}"


def logit_transform(config: Mapping[str, Any]) -> tuple[float, float | None]:
    """Return the scale and the tanh cap of logits from the `config.json` of a model."""
    text = {**config, **(config.get("text_config") or {})}
    scale = 1.0
    for name in FACTORS:
        scale *= _number(text, name) or 1.0
    for name in DIVISORS:
        value = _number(text, name) or 1.0
        scale *= value if str(text.get("model_type")).startswith(MULTIPLY_BY_DIVISOR) else 1 / value
    return scale, next((cap for name in SOFTCAPS if (cap := _number(text, name))), None)


def _number(config: Mapping[str, Any], name: str) -> float | None:
    value = config.get(name)
    if value is None or isinstance(value, int | float):
        return value
    raise InvalidInputError(
        f"{name} in the config of the LM is {value!r}, but a number was expected."
    )


def special_ids(config: Mapping[str, Any]) -> set[int]:
    """Return the tokens that begin, end and pad texts, from the `config.json` of a model."""
    ids = [config.get(f"{role}_token_id") for role in ("bos", "eos", "pad")]
    flat = [token for entry in ids for token in (entry if isinstance(entry, list) else [entry])]
    return {token for token in flat if token is not None}


def unsuitable_tokens(vocabulary: Mapping[str, int], special: set[int]) -> frozenset[int]:
    """Return the tokens that no probe may use: special ones, and those of a single character.

    SentencePiece lists characters, the most frequent ones first, after all longer tokens.
    """
    short = {token for text, token in vocabulary.items() if len(text.strip(" \u0120\u2581")) < 2}
    return frozenset(short | special)
