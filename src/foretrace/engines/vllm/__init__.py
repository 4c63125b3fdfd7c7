"""Steering in vLLM: a goal for each request.

    vllm serve MODEL --logits-processors foretrace.engines.vllm:SteeringProcessor

`foretrace serve` does this, and passes the HMM and the folder of attributes in the environment. A
request names its goal in `vllm_xargs` over HTTP, or in `SamplingParams(extra_args=...)`:

    {"goal": "nontoxic & polite", "level": "strong"}
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretrace.engines.vllm.processor import SteeringProcessor

__all__ = ["SteeringProcessor"]


def __getattr__(name: str) -> Any:
    # Imported on first use: requests are also parsed where vLLM is not installed.
    if name != "SteeringProcessor":
        raise AttributeError(f"module 'foretrace.engines.vllm' has no attribute '{name}'")
    from foretrace.engines.vllm.processor import SteeringProcessor

    return SteeringProcessor
