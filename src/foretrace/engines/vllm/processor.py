"""The logits processor that users pass to vLLM, for either of its model runners."""

from typing import TYPE_CHECKING, Any

from vllm.v1.sample.logits_processor import LogitsProcessor as InterfaceV1
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as InterfaceV2

from foretrace.engines.vllm.core import validate_params
from foretrace.engines.vllm.processor_v1 import SteeringProcessorV1
from foretrace.engines.vllm.processor_v2 import SteeringProcessorV2

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig


class SteeringProcessor(InterfaceV1, InterfaceV2):  # type: ignore[misc]
    """Create the processor of the model runner that vLLM uses.

    vLLM accepts a class only if it is a subclass of the runner's interface, and does not say which
    runner it is before it creates an object. This class is a subclass of both, and creating it
    returns a `SteeringProcessorV1` or a `SteeringProcessorV2`.
    """

    def __new__(cls, vllm_config: "VllmConfig", *args: Any) -> Any:
        """Create the processor of the runner in use."""
        if vllm_config.use_v2_model_runner:
            return SteeringProcessorV2(vllm_config, *args)
        return SteeringProcessorV1(vllm_config, *args)

    @classmethod
    def validate_params(cls, params: "SamplingParams") -> None:
        """Refuse a request that cannot be steered (HTTP 400)."""
        validate_params(params)
