"""Steering in vLLM."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretrace.engines.vllm.processor_v1 import SteeringProcessor

__all__ = ["SteeringProcessor"]


def __getattr__(name: str) -> Any:
    """Import the processor on first use: requests are parsed where vLLM is not installed."""
    if name != "SteeringProcessor":
        raise AttributeError(f"module 'foretrace.engines.vllm' has no attribute '{name}'")
    from foretrace.engines.vllm.processor_v1 import SteeringProcessor

    return SteeringProcessor
