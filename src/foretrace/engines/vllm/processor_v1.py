"""The logits processor of vLLM's model runner V1: token ids are on the host."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor, process_dict_updates

from foretrace.engines.vllm import prometheus
from foretrace.engines.vllm.core import Slot, SteeringCore, Step
from foretrace.errors import InvalidInputError
from foretrace.steering.transfer import to_device

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.v1.sample.logits_processor import BatchUpdate


PLACEHOLDER = (
    "vLLM passed a placeholder for a token that is not known yet. Start it with "
    "--no-async-scheduling."
)


SPECULATION = (
    "vLLM's model runner V1 does not steer drafted tokens. Use model runner V2 for speculative "
    "decoding (VLLM_USE_V2_MODEL_RUNNER=1), or start vLLM without it."
)


class SteeringProcessorV1(LogitsProcessor):  # type: ignore[misc]
    """Steers the requests that name a goal."""

    def __init__(
        self, vllm_config: "VllmConfig", device: torch.device, is_pin_memory: bool
    ) -> None:
        if vllm_config.speculative_config is not None:
            raise InvalidInputError(SPECULATION)
        self.core = SteeringCore(vllm_config, torch.device(device))
        self.slots: dict[int, Slot] = {}  # by row
        self.free: list[int] = []  # numbers of slots without a request
        self.num_numbers = 0

    def is_argmax_invariant(self) -> bool:
        """Return False: steering changes the most probable token."""
        return False

    def update_state(self, batch_update: "BatchUpdate | None") -> None:
        """Add, remove and move requests as the batch changes."""
        if process_dict_updates(self.slots, batch_update, self._add):
            used = {slot.number for slot in self.slots.values()}
            self.free = [number for number in range(self.num_numbers) if number not in used]
            if not used:
                self.core.steering.assign({})  # finished requests hold no tables

    def _add(
        self, params: "SamplingParams", prompt: list[int] | None, output: list[int]
    ) -> Slot | None:
        if not self.free:
            self.free.append(self.num_numbers)
            self.num_numbers += 1
        slot = Slot(params, prompt, len(prompt or ()), output, self.free[-1])
        opened = self.core.open(slot, resumed=bool(output))  # a preempted request has output
        if opened is not None:
            self.free.pop()
        return opened

    @torch.inference_mode()
    def apply(self, logits: Tensor) -> Tensor:
        """Reweight the rows of steered requests in place: (rows, V or more)."""
        if self.slots:
            with prometheus.timed_step():
                step = self._update_states(len(logits))
                failed = [row for row, slot in self.slots.items() if slot.failed]
                self.core.apply(logits, step.numbers, failed)
        return logits

    def _update_states(self, num_rows: int) -> Step:
        """Advance states that lack one token, and compute new ones from all tokens."""
        for slot in self.slots.values():
            # With asynchronous scheduling, vLLM appends a placeholder for a token that is not
            # sampled yet, and replaces it before processors run.
            if slot.output and slot.output[-1] < 0 and not slot.failed:
                self.core.fail(slot, PLACEHOLDER)
        rows = {row: slot for row, slot in self.slots.items() if not slot.failed}
        counts = {row: len(slot.output) for row, slot in rows.items()}
        self.core.steering.assign({one.number: one.request for one in rows.values() if one.request})
        step = self.core.update(num_rows, counts, rows)
        tokens = [0] * num_rows
        for row in step.moved:
            tokens[row] = rows[row].output[-1]
        self.core.advance(step, to_device(tokens, self.core.cache.hmm.device))
        # Requests that are new, or that resume after preemption.
        new = [rows[row] for row in step.new]
        requests = [slot.request for slot in new if slot.request is not None]
        numbers = [slot.number for slot in new]
        self.core.steering.read_generated(numbers, requests, [slot.output for slot in new])
        return step
