"""The logits processors of vLLM's model runners, and the class that users pass to vLLM."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor as InterfaceV1
from vllm.v1.sample.logits_processor import process_dict_updates
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as InterfaceV2

from foretrace.engines.vllm import metrics
from foretrace.engines.vllm.admission import validate_params
from foretrace.engines.vllm.core import RequestEntry, SteeringCore, Step
from foretrace.engines.vllm.drafts import DraftedStates, SteeredRequest, rows_of_requests
from foretrace.errors import InvalidInputError
from foretrace.steering.batch_index import to_device

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.v1.sample.logits_processor import BatchUpdate
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcRequestState

PLACEHOLDER = (
    "vLLM passed a placeholder for a token that is not known yet. Start it with "
    "--no-async-scheduling."
)
SPECULATION = (
    "vLLM's model runner V1 does not steer drafted tokens. Use model runner V2 for speculative "
    "decoding (VLLM_USE_V2_MODEL_RUNNER=1), or start vLLM without it."
)
EXACT = ("standard", "block")  # methods of verification that keep the steered distribution
VERIFICATION = (
    "vLLM's rejection_sample_method '{}' accepts drafted tokens that steering forbids. Use "
    f"{' or '.join(EXACT)}."
)


class SteeringProcessorV1(InterfaceV1):  # type: ignore[misc]
    """Steers the requests of model runner V1, which has token ids on the host."""

    def __init__(
        self, vllm_config: "VllmConfig", device: torch.device, is_pin_memory: bool
    ) -> None:
        if vllm_config.speculative_config is not None:
            raise InvalidInputError(SPECULATION)
        self.core = SteeringCore(vllm_config, torch.device(device))
        self.entries: dict[int, RequestEntry] = {}  # by row
        self.free: list[int] = []  # slots without a request
        self.num_slots = 0

    def is_argmax_invariant(self) -> bool:
        """Return False: steering changes the most probable token."""
        return False

    def update_state(self, batch_update: "BatchUpdate | None") -> None:
        """Add, remove and move requests as the batch changes."""
        before = list(self.entries.values())
        if process_dict_updates(self.entries, batch_update, self._add):
            used = {entry.slot_id for entry in self.entries.values()}
            self.free = [slot for slot in range(self.num_slots) if slot not in used]
            present = {id(entry) for entry in self.entries.values()}
            ended = [entry for entry in before if id(entry) not in present]
            for entry in ended:
                if entry.has_constraint:
                    self.core.close(entry, entry.output)
            self.core.steering.finish([entry.slot_id for entry in ended])

    def _add(
        self, params: "SamplingParams", prompt: list[int] | None, output: list[int]
    ) -> RequestEntry | None:
        if not self.free:
            self.free.append(self.num_slots)
            self.num_slots += 1
        entry = RequestEntry(params, prompt, len(prompt or ()), output, self.free[-1])
        opened = self.core.open(entry, resumed=bool(output))  # a preempted request has output
        if opened is not None:
            self.free.pop()
        return opened

    @torch.inference_mode()
    def apply(self, logits: Tensor) -> Tensor:
        """Reweight the rows of steered requests in place: (rows, V or more)."""
        if self.entries:
            with metrics.timed_step():
                step = self._update_states(len(logits))
                failed = [row for row, entry in self.entries.items() if entry.failed]
                self.core.apply(logits, step.slots, failed)
        return logits

    def _update_states(self, num_rows: int) -> Step:
        """Advance states that lack one token, and compute new ones from all tokens."""
        for entry in self.entries.values():
            # With asynchronous scheduling, vLLM appends a placeholder for a token that is not
            # sampled yet, and replaces it before processors run.
            if entry.output and entry.output[-1] < 0 and not entry.failed:
                self.core.fail(entry, PLACEHOLDER)
        rows = {row: entry for row, entry in self.entries.items() if self.core.load(entry)}
        counts = {row: len(entry.output) for row, entry in rows.items()}
        step = self.core.update(num_rows, counts, rows)
        tokens = [0] * num_rows
        for row in step.moved:
            tokens[row] = rows[row].output[-1]
        self.core.advance(step, to_device(tokens, self.core.hmm.device))
        # Requests that are new, or that resume after preemption.
        self.core.start([rows[row] for row in step.new])
        return step


class SteeringProcessorV2(InterfaceV2):  # type: ignore[misc]
    """Steers the requests of model runner V2, which has token ids on the device."""

    def __init__(self, vllm_config: "VllmConfig", request_states: "LogitsProcRequestState") -> None:
        speculative = vllm_config.speculative_config
        num_drafts = 0 if speculative is None else int(speculative.num_speculative_tokens)
        method = getattr(speculative, "rejection_sample_method", EXACT[0])
        if method not in EXACT:
            raise InvalidInputError(VERIFICATION.format(method))
        device = torch.device(request_states.device)
        self.core = SteeringCore(vllm_config, device)
        self.request_states = request_states
        self.entries: dict[int, RequestEntry] = {}  # requests of the last steps
        self.waiting: dict[int, RequestEntry] = {}  # requests that have ended, or wait
        self.present: set[int] = set()  # requests of the last step
        self.width = num_drafts + 1
        self.drafted = None
        if num_drafts:
            self.drafted = DraftedStates(self.core, num_drafts, int(request_states.max_num_reqs))

    def add_request(self, req_idx: int, sampling_params: "SamplingParams") -> bool:
        """Add a request, in place of the one that had its slot before."""
        self._suspend(req_idx)
        self.waiting.pop(req_idx, None)
        prompt_length = int(self.request_states.prompt_len.np[req_idx])
        resumed = self._prefill_length(req_idx) > prompt_length
        entry = RequestEntry(sampling_params, None, prompt_length, [], req_idx)
        if self.core.open(entry, resumed=resumed) is None:
            return False
        self.entries[req_idx] = entry
        self.present.add(req_idx)
        return True

    def apply_staged_writes(self) -> None:
        """Drop the tables and states of requests that are finished or waiting.

        vLLM does not say which, but calls this before every step. A step may call `apply` for one
        part of its requests after another. A request that waits is loaded again when it returns.
        """
        for index in self.entries.keys() - self.present:
            self._suspend(index)
        self.present.clear()

    def _suspend(self, index: int) -> None:
        """Drop the tables and the state of a request, and count what its text lacks."""
        entry = self.entries.pop(index, None)
        if entry is None:
            return
        if entry.has_constraint:
            length = int(self.request_states.total_len.gpu[index])
            tokens = self.request_states.all_token_ids.gpu[index, entry.prompt_length : length]
            self.core.close(entry, tokens.tolist())
        first = entry.slot_id * self.width
        self.core.steering.finish(range(first, first + self.width))
        entry.forget()
        self.waiting[index] = entry

    @torch.inference_mode()
    def apply(self, logits: Tensor, ctx: "LogitsContext") -> Tensor:
        """Reweight the rows of steered requests in place: (rows, V or more)."""
        if self.entries or self.waiting:
            batch = ctx.idx_mapping_np.tolist()
            self.present.update(batch)
            for index in self.waiting.keys() & batch:
                self.entries[index] = self.waiting.pop(index)
            if not self.entries.keys().isdisjoint(batch):
                with metrics.timed_step():
                    self._steer(logits, ctx, batch)
        return logits

    def _steer(self, logits: Tensor, context: "LogitsContext", batch: list[int]) -> None:
        failed: list[int] = []
        requests = self._steered(context, batch, len(logits), failed)
        slots = self._update_states(requests, context, len(logits))
        self.core.apply(logits, slots, failed)

    def _prefill_length(self, index: int) -> int:
        return int(self.request_states.prefill_len.np[index])

    def _steered(
        self, context: "LogitsContext", batch: list[int], num_rows: int, failed: list[int]
    ) -> list[SteeredRequest]:
        """Return the steered requests of a step; append the rows of those that have failed."""
        lengths = context.seq_lens_upper_bound_np[: len(batch)].tolist()
        prefilled = [self._prefill_length(index) for index in batch]
        rows = rows_of_requests(context, prefilled, num_rows, self.width)
        steered = []
        for index, length, prefill, its_rows in zip(batch, lengths, prefilled, rows, strict=True):
            entry = self.entries.get(index)
            # A row whose prompt is not complete generates nothing yet.
            if entry is not None and length >= prefill:
                if self.core.load(entry):
                    steered.append(SteeredRequest(entry, its_rows, length))
                else:
                    failed.extend(its_rows)
        return steered

    def _update_states(
        self, requests: list[SteeredRequest], context: "LogitsContext", num_rows: int
    ) -> list[int | None]:
        """Update the states of this step's rows; return the slot of each row.

        Nothing waits for the device, unless a request returns after it has waited, or vLLM has cut
        drafts.
        """
        if self.drafted is not None:
            new = [one for one in requests if one.entry.num_generated is None]
            self._read([one.entry for one in new], [self._length(one, context) for one in new])
            return self.drafted.update(requests, context, num_rows)
        rows = {one.rows[0]: one for one in requests}
        step = self.core.update(
            num_rows,
            {row: one.num_generated for row, one in rows.items()},
            {row: one.entry for row, one in rows.items()},
        )
        self.core.advance(step, context.input_ids.long())
        new = [rows[row] for row in step.new]
        self._read([one.entry for one in new], [one.length for one in new])
        return step.slots

    def _length(self, request: SteeredRequest, context: "LogitsContext") -> int:
        """Return the number of tokens before the drafts; if some are generated, ask the device."""
        if request.length == self._prefill_length(request.entry.slot_id):
            return request.length
        return int(context.pos[request.rows[0]]) + 1

    def _read(self, entries: list[RequestEntry], lengths: list[int]) -> None:
        """Compute the states of requests from all their tokens."""
        if entries:
            index = to_device([entry.slot_id for entry in entries], self.request_states.device)
            tokens = self.request_states.all_token_ids.gpu[index, : max(lengths)].long()
            prompts = torch.tensor([entry.prompt_length for entry in entries])
            requests = {entry.slot_id * self.width: entry.request for entry in entries}
            steering, width = self.core.steering, self.width
            steering.prefill(
                {slot: request for slot, request in requests.items() if request is not None},
                tokens,
                prompts,
                torch.tensor(lengths),
            )
            # The rows of drafted tokens share the request.
            steering.move({slot + depth: slot for slot in requests for depth in range(1, width)})
            for entry in entries:  # the steering has the tables now
                entry.request = steering.request(entry.slot_id * width)


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
