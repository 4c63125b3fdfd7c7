"""The logits processor of vLLM's model runner V2: token ids are on the device."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

from foretrace.engines.vllm import prometheus
from foretrace.engines.vllm.core import Slot, SteeringCore, Step
from foretrace.steering.transfer import to_device

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcRequestState


class SteeringProcessorV2(LogitsProcessor):  # type: ignore[misc]
    """Steers the requests that name a goal."""

    def __init__(self, vllm_config: "VllmConfig", request_states: "LogitsProcRequestState") -> None:
        self.core = SteeringCore(vllm_config, torch.device(request_states.device))
        self.request_states = request_states
        self.slots: dict[int, Slot] = {}

    def add_request(self, req_idx: int, sampling_params: "SamplingParams") -> bool:
        """Add a request, in place of the one that had its slot before."""
        self.slots.pop(req_idx, None)
        prompt_length = self._prompt_length(req_idx)
        resumed = int(self.request_states.prefill_len.np[req_idx]) > prompt_length
        slot = self.core.open(
            Slot(sampling_params, None, prompt_length, [], req_idx), resumed=resumed
        )
        if slot is not None:
            self.slots[req_idx] = slot
        return slot is not None

    @torch.inference_mode()
    def apply(self, logits: Tensor, ctx: "LogitsContext") -> Tensor:
        """Reweight the rows of steered requests in place: (rows, V or more)."""
        if self.slots:
            with prometheus.timed_step():
                batch = ctx.idx_mapping_np.tolist()
                self._release_absent(batch)
                step = self._update_states(batch, ctx)
                slots = [self.slots.get(index) for index in batch]
                failed = [row for row, slot in enumerate(slots) if slot is not None and slot.failed]
                self.core.apply(logits, step, failed)
        return logits

    def _prompt_length(self, index: int) -> int:
        return int(self.request_states.prompt_len.np[index])

    def _release_absent(self, batch: list[int]) -> None:
        """Drop the tables and states of requests that are finished or waiting.

        vLLM does not say which. A request that waits is loaded again when it returns.
        """
        for index in self.slots.keys() - set(batch):
            self.slots[index].forget()

    def _update_states(self, batch: list[int], context: "LogitsContext") -> Step:
        """Update the states of this step's rows without waiting for the device."""
        lengths = context.seq_lens_upper_bound_np.tolist()
        rows, counts = {}, {}
        for row, (index, length) in enumerate(zip(batch, lengths, strict=True)):
            slot = self.slots.get(index)
            # A row whose prompt is not complete generates nothing yet.
            if slot is not None and length >= slot.prompt_length and self._loaded(slot):
                rows[row], counts[row] = slot, length - slot.prompt_length
        step = self.core.update(len(batch), counts, rows)
        self.core.advance(step, context.input_ids.long())
        self._read([rows[row] for row in step.new], [lengths[row] for row in step.new])
        return step

    def _loaded(self, slot: Slot) -> bool:
        if slot.request is None and not slot.failed:
            self.core.load(slot)
        return not slot.failed

    def _read(self, slots: list[Slot], lengths: list[int]) -> None:
        if slots:
            numbers = [slot.number for slot in slots]
            index = to_device(numbers, self.request_states.device)
            tokens = self.request_states.all_token_ids.gpu[index, : max(lengths)].long()
            prompts = torch.tensor([slot.prompt_length for slot in slots])
            requests = [slot.request for slot in slots if slot.request is not None]
            self.core.steering.read(numbers, requests, tokens, prompts, torch.tensor(lengths))
