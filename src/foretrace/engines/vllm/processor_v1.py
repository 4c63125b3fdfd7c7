"""The logits processor of vLLM's model runner V1: token ids are on the host."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor, process_dict_updates

from foretrace.engines.vllm import prometheus
from foretrace.engines.vllm.core import Slot, SteeringCore, set_states

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.v1.sample.logits_processor import BatchUpdate


class SteeringProcessorV1(LogitsProcessor):  # type: ignore[misc]
    """Steers the requests that name a goal."""

    def __init__(
        self, vllm_config: "VllmConfig", device: torch.device, is_pin_memory: bool
    ) -> None:
        self.core = SteeringCore(vllm_config, torch.device(device))
        self.slots: dict[int, Slot] = {}

    def is_argmax_invariant(self) -> bool:
        """Return False: steering changes the most probable token."""
        return False

    def update_state(self, batch_update: "BatchUpdate | None") -> None:
        """Add, remove and move requests as the batch changes."""
        process_dict_updates(self.slots, batch_update, self._add)

    def _add(
        self, params: "SamplingParams", prompt: list[int] | None, output: list[int]
    ) -> Slot | None:
        slot = Slot(params, prompt, len(prompt or ()), output)
        return self.core.open(slot, resumed=bool(output))  # a preempted request has output

    @torch.inference_mode()
    def apply(self, logits: Tensor) -> Tensor:
        """Reweight the rows of steered requests in place: (rows, V or more)."""
        if self.slots:
            with prometheus.timed_step():
                self._update_states()
                self.core.apply(logits, self.slots)
        return logits

    def _update_states(self) -> None:
        """Advance states that lack one token, and compute new ones from all tokens."""
        active = [slot for slot in self.slots.values() if not slot.failed]
        missing = [slot.missing(len(slot.output)) for slot in active]
        advanced = [slot for slot, count in zip(active, missing, strict=True) if count == 1]
        tokens = torch.tensor([slot.output[-1] for slot in advanced], dtype=torch.long)
        self.core.advance(advanced, tokens.to(self.core.cache.hmm.device))
        # Requests that are new, or that resume after preemption.
        new = [slot for slot, count in zip(active, missing, strict=True) if count not in (0, 1)]
        requests = [slot.request for slot in new if slot.request is not None]
        outputs = [slot.output for slot in new]
        set_states(new, self.core.steering.read_generated(requests, outputs))
