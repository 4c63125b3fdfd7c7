"""The logits processor of vLLM's model runner V2: token ids are on the device."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

from foretrace.engines.vllm import prometheus
from foretrace.engines.vllm.core import Slot, SteeringCore
from foretrace.engines.vllm.drafts import DraftedStates, SteeredRequest, rows_of_requests
from foretrace.steering.transfer import to_device

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcRequestState


class SteeringProcessorV2(LogitsProcessor):  # type: ignore[misc]
    """Steers the requests that name a goal."""

    def __init__(self, vllm_config: "VllmConfig", request_states: "LogitsProcRequestState") -> None:
        speculative = vllm_config.speculative_config
        num_drafts = 0 if speculative is None else int(speculative.num_speculative_tokens)
        device = torch.device(request_states.device)
        self.core = SteeringCore(vllm_config, device, num_drafts)
        self.request_states = request_states
        self.slots: dict[int, Slot] = {}
        self.present: set[int] = set()  # requests of the last step
        self.width = num_drafts + 1
        self.drafted = None
        if num_drafts:
            self.drafted = DraftedStates(self.core, num_drafts, int(request_states.max_num_reqs))

    def add_request(self, req_idx: int, sampling_params: "SamplingParams") -> bool:
        """Add a request, in place of the one that had its slot before."""
        self.slots.pop(req_idx, None)
        prompt_length = int(self.request_states.prompt_len.np[req_idx])
        resumed = self._prefill_length(req_idx) > prompt_length
        slot = self.core.open(
            Slot(sampling_params, None, prompt_length, [], req_idx), resumed=resumed
        )
        if slot is not None:
            self.slots[req_idx] = slot
            self.present.add(req_idx)
        return slot is not None

    def apply_staged_writes(self) -> None:
        """Drop the tables and states of requests that are finished or waiting.

        vLLM does not say which, but calls this before every step. A step may call `apply` for one
        part of its requests after another. A request that waits is loaded again when it returns.
        """
        for index in self.slots.keys() - self.present:
            self.slots[index].forget()
        self.present.clear()

    @torch.inference_mode()
    def apply(self, logits: Tensor, ctx: "LogitsContext") -> Tensor:
        """Reweight the rows of steered requests in place: (rows, V or more)."""
        if self.slots:
            with prometheus.timed_step():
                failed: list[int] = []
                requests = self._steered(ctx, len(logits), failed)
                self._assign()
                numbers = self._update_states(requests, ctx, len(logits))
                self.core.apply(logits, numbers, failed)
        return logits

    def _prefill_length(self, index: int) -> int:
        return int(self.request_states.prefill_len.np[index])

    def _steered(
        self, context: "LogitsContext", num_rows: int, failed: list[int]
    ) -> list[SteeredRequest]:
        """Return the steered requests of a step; append the rows of those that have failed."""
        batch = context.idx_mapping_np.tolist()
        self.present.update(batch)
        if not any(index in self.slots for index in batch):
            return []
        lengths = context.seq_lens_upper_bound_np[: len(batch)].tolist()
        prefilled = [self._prefill_length(index) for index in batch]
        rows = rows_of_requests(context, prefilled, num_rows, self.width)
        steered = []
        for index, length, prefill, its_rows in zip(batch, lengths, prefilled, rows, strict=True):
            slot = self.slots.get(index)
            # A row whose prompt is not complete generates nothing yet.
            if slot is not None and length >= prefill:
                if self._loaded(slot):
                    steered.append(SteeredRequest(slot, its_rows, length))
                else:
                    failed.extend(its_rows)
        return steered

    def _loaded(self, slot: Slot) -> bool:
        if slot.request is None and not slot.failed:
            self.core.load(slot)
        return not slot.failed

    def _assign(self) -> None:
        """Keep the states of all requests, and not only of those that this part of a step has."""
        requests = [(slot, slot.request) for slot in self.slots.values()]
        self.core.steering.assign(
            {
                slot.number * self.width + depth: request
                for slot, request in requests
                if request is not None
                for depth in range(self.width)
            }
        )

    def _update_states(
        self, requests: list[SteeredRequest], context: "LogitsContext", num_rows: int
    ) -> list[int | None]:
        """Update the states of this step's rows; return the slot number of each row.

        Nothing waits for the device, unless a request returns after it has waited, or vLLM has cut
        drafts.
        """
        if self.drafted is not None:
            new = [one for one in requests if one.slot.num_generated is None]
            self._read([one.slot for one in new], [self._length(one, context) for one in new])
            return self.drafted.update(requests, context, num_rows)
        rows = {one.rows[0]: one for one in requests}
        step = self.core.update(
            num_rows,
            {row: one.num_generated for row, one in rows.items()},
            {row: one.slot for row, one in rows.items()},
        )
        self.core.advance(step, context.input_ids.long())
        new = [rows[row] for row in step.new]
        self._read([one.slot for one in new], [one.length for one in new])
        return step.numbers

    def _length(self, request: SteeredRequest, context: "LogitsContext") -> int:
        """Return the number of tokens before the drafts; if some are generated, ask the device."""
        if request.length == self._prefill_length(request.slot.number):
            return request.length
        return int(context.pos[request.rows[0]]) + 1

    def _read(self, slots: list[Slot], lengths: list[int]) -> None:
        """Compute the states of slots from all their tokens."""
        if slots:
            index = to_device([slot.number for slot in slots], self.request_states.device)
            tokens = self.request_states.all_token_ids.gpu[index, : max(lengths)].long()
            prompts = torch.tensor([slot.prompt_length for slot in slots])
            requests = [slot.request for slot in slots if slot.request is not None]
            numbers = [slot.number * self.width for slot in slots]
            self.core.steering.read(numbers, requests, tokens, prompts, torch.tensor(lengths))
