"""Steering in vLLM: a logits processor for both of its model runners.

    vllm serve MODEL --logits-processors foretrace.engines.vllm:SteeringProcessor

with the HMM and the attributes' folder in the environment (`foretrace serve` does both). A request
says what it wants in `vllm_xargs` over HTTP, or in `SamplingParams(extra_args=...)`:

    {"goal": "nontoxic & ~formal", "strength": 3, "shift": -3}
"""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor as ProcessorV1
from vllm.v1.sample.logits_processor import process_dict_updates
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as ProcessorV2

from foretrace.engines.vllm import prometheus as counters
from foretrace.engines.vllm.params import read_asked
from foretrace.engines.vllm.settings import open_library
from foretrace.errors import ForetraceError, InvalidInputError
from foretrace.hmm import HMM
from foretrace.steering import BatchSteering, Request, SequenceState
from foretrace.vocabulary import fingerprint, require_same_fingerprint

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.v1.sample.logits_processor import BatchUpdate
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext

logger = logging.getLogger(__name__)

# What validation writes into a request's arguments.
ADMITTED, STOPS, LEASED = "foretrace_tables", "foretrace_stops", "foretrace_leased"


@dataclass
class _Slot:
    """A request in the batch; `request` is None where its goal could not be had."""

    request: Request | None
    output: list[int]
    """What is written, alive; empty and not used by runner V2."""
    row: SequenceState | None = None

    def lacks(self, written: int) -> int:
        """How many tokens the row is behind; less than 0 if there is none, or another text's."""
        return -1 if self.row is None else written - self.row.num_generated


class SteeringProcessor(ProcessorV1, ProcessorV2):  # type: ignore[misc]
    """Steers the requests that ask for it, whatever their goals, in one batch of tensor work."""

    def __init__(
        self, vllm_config: "VllmConfig", where: Any, is_pin_memory: bool | None = None
    ) -> None:
        """Runner V1 gives a device and a flag; V2 the state of its requests."""
        if vllm_config.speculative_config is not None:
            raise InvalidInputError(
                "Speculative decoding drafts tokens that are not steered. Start vLLM without it, "
                "or without foretrace."
            )
        device = where if is_pin_memory is not None else where.device
        self.states = None if is_pin_memory is not None else where
        self.library = open_library(torch.device(device), counters.observe_library)
        _check_model(vllm_config, self.library.hmm)
        self.longest = int(vllm_config.model_config.max_model_len)
        self.steering = BatchSteering(self.library.hmm, counters.MeanEAP().add)
        self.slots: dict[int, _Slot] = {}
        self.ends = _ends(vllm_config, self.library.hmm.config.eos_token_ids)

    # Admission: in the process that takes requests.

    @classmethod
    def validate_params(cls, params: "SamplingParams") -> None:
        """Refuse what cannot be steered toward (HTTP 400), and build the tables of what can."""
        _forget_admission(params)
        try:
            asked = read_asked(params.extra_args)
            if asked is None:
                return
            library = open_library(torch.device("cpu"), counters.observe_library)
            keys = library.admit(asked, params.max_tokens)
        except ForetraceError:
            counters.REFUSED.inc()
            raise
        stops = [] if params.ignore_eos else _stop_at(params, library.hmm.config.eos_token_ids)
        # The server's middleware leases the tables: they cannot be evicted before decoding.
        leased = {LEASED: True} if library.read_only else {}
        params.extra_args = {**params.extra_args, ADMITTED: keys, STOPS: stops, **leased}

    def _admitted(
        self, params: "SamplingParams", prompt: list[int] | None, length: int
    ) -> Request | None:
        """Give what a request wants; None if it wants nothing."""
        asked = read_asked(params.extra_args)
        if asked is None:
            return None
        extra = params.extra_args or {}
        keys = extra.get(ADMITTED) or self.library.admit(asked)
        # A server's decoding process never builds: that would hold up the whole batch.
        goals = self.library.goals(asked, keys, build=not extra.get(LEASED, False))
        limit = min(params.max_tokens or self.longest, self.longest - length)
        ends = tuple(params.all_stop_token_ids)
        return Request(goals, tuple(prompt or ()), limit, asked.horizon, ends)

    def _slot(
        self,
        params: "SamplingParams",
        prompt: list[int] | None,
        output: list[int],
        length: int | None = None,
    ) -> _Slot | None:
        """Take in a request. What fails here is ended at once: it must not be written unsteered."""
        try:
            request = self._admitted(params, prompt, length or len(prompt or ()))
        except Exception:
            logger.exception("A request cannot be steered, and is ended")
            counters.FAILED.inc()
            return _Slot(None, output)
        if request is None:
            return None
        if not output:  # else it comes back from preemption
            counters.REQUESTS.inc()
        return _Slot(request, output)

    # Model runner V1: the batch is told of, texts are on the host.

    def is_argmax_invariant(self) -> bool:
        """Steering changes the likeliest token, too."""
        return False

    def update_state(self, batch_update: "BatchUpdate | None") -> None:
        """Follow the batch: requests come, go, and change places."""
        process_dict_updates(self.slots, batch_update, self._slot)

    def _rows_v1(self) -> dict[int, _Slot]:
        """Bring all rows up to what is written: one token more, or read anew."""
        moved, new = [], []
        for slot in self.slots.values():
            if slot.request is None:
                continue
            lacking = slot.lacks(len(slot.output))
            if lacking == 1:
                moved.append(slot)
            elif lacking != 0:  # new, or back from preemption
                new.append(slot)
        tokens = torch.tensor([slot.output[-1] for slot in moved], dtype=torch.long)
        self._advance(moved, tokens.to(self.library.hmm.device))
        requests = [slot.request for slot in new if slot.request is not None]
        read = self.steering.read_generated(requests, [slot.output for slot in new])
        self._take(new, read)
        return self.slots

    # Model runner V2: slots are told of, texts are on the device.

    def add_request(self, req_idx: int, sampling_params: "SamplingParams") -> bool:
        """Take in a request; whatever the slot held before is forgotten."""
        self.slots.pop(req_idx, None)
        assert self.states is not None  # it is what runner V2 gave
        length = int(self.states.prompt_len.np[req_idx])
        slot = self._slot(sampling_params, None, [], length)
        if slot is not None:
            self.slots[req_idx] = slot
        return slot is not None

    def _rows_v2(self, context: "LogitsContext") -> dict[int, _Slot]:
        """Bring the rows of this step up to what is written, without waiting for the device."""
        assert self.states is not None  # it is what runner V2 gave
        placed, moved, new = {}, [], []
        lengths, here = context.seq_lens_upper_bound_np, context.idx_mapping_np.tolist()
        for index in self.slots.keys() - set(here):
            self.slots[index].row = None  # done, or waiting: it can be read again
        for place, index in enumerate(here):
            slot = self.slots.get(index)
            if slot is None:
                continue
            placed[place] = slot
            written = int(lengths[place]) - int(self.states.prompt_len.np[index])
            if slot.request is None or written < 0:  # the prompt is not read to its end
                continue
            lacking = slot.lacks(written)
            if lacking == 1:
                moved.append((slot, index, int(lengths[place]) - 1))
            elif lacking != 0:
                new.append((slot, index, int(lengths[place])))
        ids = self.states.all_token_ids.gpu
        if moved:
            slots, rows, last = map(list, zip(*moved, strict=True))
            self._advance(slots, ids[rows, last].long())
        if new:
            slots, rows, total = map(list, zip(*new, strict=True))
            prompts = torch.tensor([int(self.states.prompt_len.np[row]) for row in rows])
            texts = ids[rows, : max(total)].long()
            requests = [slot.request for slot in slots]
            self._take(slots, self.steering.read(requests, texts, prompts, torch.tensor(total)))
        return placed

    # Both.

    @torch.inference_mode()
    def apply(self, logits: Tensor, ctx: "LogitsContext | None" = None) -> Tensor:
        """Reweight the rows of steered requests: (rows, V or more) logits."""
        if not self.slots:
            return logits
        with counters.timed_step():
            slots = self._rows_v1() if ctx is None else self._rows_v2(ctx)
            rows: list[SequenceState | None] = [None] * len(logits)
            for place, slot in slots.items():
                rows[place] = slot.row
            self.steering.reweight_(logits, rows)
            self._end(logits, [place for place, slot in slots.items() if slot.request is None])
        return logits

    def _advance(self, slots: list[_Slot], tokens: Tensor) -> None:
        before = [slot.row for slot in slots if slot.row is not None]
        self._take(slots, self.steering.advance(before, tokens))

    def _take(self, slots: list[_Slot], rows: list[SequenceState]) -> None:
        for slot, row in zip(slots, rows, strict=True):
            slot.row = row

    def _end(self, logits: Tensor, places: list[int]) -> None:
        """Let rows that could not be steered write nothing but their end."""
        if places:
            logits[places] = -torch.inf
            logits[torch.tensor(places)[:, None], torch.tensor(self.ends)] = 0.0


def _stop_at(params: "SamplingParams", ends: tuple[int, ...]) -> list[int]:
    """Let a steered text end where the HMM says so, too; give what was added."""
    known = params.stop_token_ids or []
    added = [end for end in ends if end not in known]
    params.stop_token_ids = [*known, *added]
    params.all_stop_token_ids.update(added)
    return added


def _forget_admission(params: "SamplingParams") -> None:
    """Undo what an admission before left: the same object may be sent again, with no goal."""
    given = dict(params.extra_args or {})
    for key in (ADMITTED, LEASED):
        given.pop(key, None)
    stops = given.pop(STOPS, None)
    if isinstance(stops, list):
        params.stop_token_ids = [each for each in params.stop_token_ids or [] if each not in stops]
        params.all_stop_token_ids.difference_update(stops)
    if params.extra_args is not None:
        params.extra_args = given


def _ends(config: "VllmConfig", known: tuple[int, ...]) -> list[int]:
    """Find what ends a text: the HMM knows, or the LM."""
    own = getattr(config.model_config.hf_config, "eos_token_id", None)
    return list(known) or ([own] if isinstance(own, int) else list(own or [0]))


def _check_model(config: "VllmConfig", hmm: HMM) -> None:
    """Refuse the HMM of another LM, before anybody is served."""
    from vllm.tokenizers import cached_tokenizer_from_config

    tokens = config.model_config.get_vocab_size()
    if hmm.vocab_size > tokens:
        raise InvalidInputError(
            f"The HMM knows {hmm.vocab_size} tokens, but the LM {tokens}. Is it the HMM of this LM?"
        )
    tokenizer = cached_tokenizer_from_config(config.model_config)
    if tokenizer is not None:
        known = hmm.config.tokenizer_fingerprint
        require_same_fingerprint("The HMM", known, fingerprint(tokenizer.get_vocab()))
