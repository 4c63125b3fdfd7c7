"""The logits processor of vLLM's model runner V2: token ids are on the device."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

from foretrace.engines.vllm import prometheus
from foretrace.engines.vllm.core import Slot, SteeringCore, set_states

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
        slot = self.core.open(Slot(sampling_params, None, prompt_length, []), resumed=resumed)
        if slot is not None:
            self.slots[req_idx] = slot
        return slot is not None

    @torch.inference_mode()
    def apply(self, logits: Tensor, ctx: "LogitsContext") -> Tensor:
        """Reweight the rows of steered requests in place: (rows, V or more)."""
        if self.slots:
            with prometheus.timed_step():
                self.core.apply(logits, self._update_states(ctx))
        return logits

    def _prompt_length(self, index: int) -> int:
        return int(self.request_states.prompt_len.np[index])

    def _update_states(self, context: "LogitsContext") -> dict[int, Slot]:
        """Update the states of this step's rows without waiting for the device; return the rows."""
        batch = context.idx_mapping_np.tolist()
        self._release_absent(batch)
        rows, moved, new = {}, [], []
        for row, index in enumerate(batch):
            slot = self.slots.get(index)
            if slot is None:
                continue
            rows[row] = slot
            length = int(context.seq_lens_upper_bound_np[row])
            num_generated = length - slot.prompt_length
            if num_generated < 0 or not self._loaded(slot):  # or the prompt is not complete
                continue
            missing = slot.missing(num_generated)
            if missing == 1:
                moved.append((slot, index, length - 1))
            elif missing != 0:
                new.append((slot, index, length))
        self._advance(moved)
        self._read(new)
        return rows

    def _release_absent(self, batch: list[int]) -> None:
        """Drop the tables and states of requests that are finished or waiting.

        vLLM does not say which. A request that waits is loaded again when it returns.
        """
        for index in self.slots.keys() - set(batch):
            self.slots[index].request = self.slots[index].state = None

    def _loaded(self, slot: Slot) -> bool:
        if slot.request is None and not slot.failed:
            self.core.load(slot)
        return not slot.failed

    def _advance(self, moved: list[tuple[Slot, int, int]]) -> None:
        if moved:
            slots, indices, last = map(list, zip(*moved, strict=True))
            tokens = self.request_states.all_token_ids.gpu[indices, last]
            self.core.advance(slots, tokens.long())

    def _read(self, new: list[tuple[Slot, int, int]]) -> None:
        if new:
            slots, indices, lengths = map(list, zip(*new, strict=True))
            prompts = torch.tensor([slot.prompt_length for slot in slots])
            tokens = self.request_states.all_token_ids.gpu[indices, : max(lengths)].long()
            requests = [slot.request for slot in slots]
            states = self.core.steering.read(requests, tokens, prompts, torch.tensor(lengths))
            set_states(slots, states)
