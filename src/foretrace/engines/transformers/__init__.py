"""Steering in transformers."""

from foretrace.engines.transformers.processor import (
    Goals,
    SteeringProcessor,
    decode_after,
    encode_prompts,
    generate,
    generate_tokens,
    left_padded,
    placed,
    stop_tokens,
    to_the_end,
)

__all__ = [
    "Goals",
    "SteeringProcessor",
    "decode_after",
    "encode_prompts",
    "generate",
    "generate_tokens",
    "left_padded",
    "placed",
    "stop_tokens",
    "to_the_end",
]
