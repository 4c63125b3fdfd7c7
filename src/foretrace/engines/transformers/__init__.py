"""Steering in transformers: `Steerer`, generation in one call, and a logits processor."""

from foretrace.engines.prompts import Goals, decode_after, encode_prompts, turn_ends
from foretrace.engines.transformers.generation import generate, generate_tokens, stop_tokens
from foretrace.engines.transformers.processor import SteeringProcessor
from foretrace.engines.transformers.steerer import SteeredText, Steerer
from foretrace.engines.transformers.unigram import unigram_hmm

__all__ = [
    "Goals",
    "SteeredText",
    "Steerer",
    "SteeringProcessor",
    "decode_after",
    "encode_prompts",
    "generate",
    "generate_tokens",
    "stop_tokens",
    "turn_ends",
    "unigram_hmm",
]
