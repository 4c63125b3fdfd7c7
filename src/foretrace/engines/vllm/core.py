"""The requests, goals and states of a vLLM batch, for the processors of both model runners."""

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from foretrace.attribute import LogitAffine
from foretrace.engines.vllm import metrics
from foretrace.engines.vllm.params import ADMISSION, Admission, names_goal, parse
from foretrace.engines.vllm.settings import Settings, open_builder
from foretrace.engines.vllm.table_store import CompiledMarker, ResidentTables
from foretrace.errors import ForetraceError, InvalidInputError
from foretrace.hmm import HMM
from foretrace.steering import Goal, Marker, Request, SlotSteering
from foretrace.steering.marker_pool import MarkerEntry
from foretrace.steering.slab import Slab
from foretrace.steering.transfer import to_device
from foretrace.vocabulary import fingerprint, require_same_fingerprint

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

ENDS = ("after", "until")  # the markers of a window
MAX_MARKERS = 64  # that the steering keeps for later requests
SECONDS_BETWEEN_LOGS = 60.0  # of texts that end without what is required


@dataclass
class RequestEntry:
    """A request of the batch."""

    params: "SamplingParams"
    prompt: list[int] | None
    """Token ids of the prompt, where the runner has them on the host."""
    prompt_length: int
    output: list[int]
    """Generated token ids, updated by runner V1; runner V2 has them on the device."""
    slot_id: int
    """The number of its slot in the steering."""
    admission: Admission | None = None
    loading: "Future[None] | None" = None
    request: Request | None = None
    num_generated: int | None = None
    """How many generated tokens its state includes; None if there is no state."""
    failed: bool = False
    """Whether its goals could not be loaded. Such a request is ended, not left unsteered."""

    def missing(self, num_generated: int) -> int:
        """Return how many generated tokens the state lacks; -1 if it must be computed from all."""
        if self.num_generated is None or self.num_generated > num_generated:
            return -1
        return num_generated - self.num_generated

    def forget(self) -> None:
        """Drop the goals and the state; both can be loaded again."""
        self.request = self.num_generated = None

    @property
    def has_constraint(self) -> bool:
        """Return whether it has required or forbidden texts."""
        goals = () if self.request is None else self.request.goals
        return any(goal.lookahead.automaton is not None for goal in goals)


class SteeringCore:
    """Loads the goals of requests, and steers their rows in one batch of tensor operations."""

    def __init__(
        self, vllm_config: "VllmConfig", device: torch.device, num_drafts: int = 0
    ) -> None:
        """Load the HMM of a server.

        Args:
            vllm_config: The settings of vLLM.
            device: Where logits are.
            num_drafts: Drafted tokens of a request in a step at most.
        """
        self.builder = open_builder(device, metrics.observe_cache)
        self.hmm = self.builder.hmm
        _check_model(vllm_config, self.hmm)
        self.builder.load_tokenizer()  # markers need it, and a request must not hold up the batch
        self.max_length = int(vllm_config.model_config.max_model_len)
        memory = Settings.from_environment().memory_mb << 20
        self.tables = ResidentTables(
            self.hmm, self.builder.horizon, self.builder.store, memory, metrics.observe_cache
        )
        # With drafts, a step advances the rows after as many drafted tokens, and reweights all.
        num_plans = num_drafts + 2 if num_drafts else 1
        self.steering = SlotSteering(self.hmm, num_plans=num_plans)
        self.price_meter = metrics.PriceMeter()
        self.ends = _ends(vllm_config, self.hmm.config.eos_token_ids)
        self._logged = -SECONDS_BETWEEN_LOGS

    def open(self, entry: RequestEntry, *, resumed: bool) -> RequestEntry | None:
        """Begin to load the goals of a request that enters the batch; None if it has none."""
        extra_args = entry.params.extra_args or {}
        if ADMISSION in extra_args:
            entry.admission = Admission.from_plain(extra_args[ADMISSION])
            entry.loading = self.tables.prefetch(entry.admission)
        elif names_goal(extra_args):
            self.fail(entry, "It was not checked by SteeringProcessor.validate_params.")
        else:
            return None
        if not resumed and not entry.failed:
            metrics.REQUESTS.inc()
        return entry

    def load(self, entry: RequestEntry) -> bool:
        """Load the goals of a request, if they are not; return False if they cannot be."""
        if entry.request is None and not entry.failed:
            try:
                entry.request = self._request(entry)
            except Exception as error:
                self.fail(entry, str(error), error)
        return not entry.failed

    def fail(self, entry: RequestEntry, reason: str, error: Exception | None = None) -> None:
        """Mark a request as failed: it ends with the next token."""
        logger.error(
            "A request cannot be steered, and is ended: %s",
            reason,
            exc_info=error,
            extra={"goal": (entry.params.extra_args or {}).get("goal")},
        )
        metrics.FAILED.inc()
        entry.failed = True

    def _request(self, entry: RequestEntry) -> Request:
        params, admission = entry.params, entry.admission
        assert admission is not None
        try:
            if entry.loading is not None:
                entry.loading.result()
            goals = self._goals(admission)
        except ForetraceError:
            # A server's decoding process never builds: that would hold up the whole batch. A
            # request keeps the attributes it was admitted with: others are not built for it.
            steering_params = None if admission.leased else parse(params.extra_args)
            if (
                steering_params is None
                or self.builder.build(steering_params).keys != admission.keys
            ):
                raise
            goals = self._goals(admission)
        finally:
            entry.loading = None
        limit = min(params.max_tokens or self.max_length, self.max_length - entry.prompt_length)
        ends = tuple(params.all_stop_token_ids)
        return Request(goals, tuple(entry.prompt or ()), limit, admission.horizon, ends)

    def _goals(self, admission: Admission) -> tuple[Goal, ...]:
        """Return the goals of a request whose tables and markers are built."""
        markers = {text: self.builder.marker(text) for text in admission.markers}
        for text, key in admission.markers.items():
            _add_marker(self.steering, markers[text], self.tables.marker(key))
        window = admission.window
        return tuple(
            Goal(
                self.tables.lookahead(key),
                strength=1.0,  # the strengths are inside the lookahead
                transform=LogitAffine(*transform),
                neutral_end=admission.neutral_end,
                after=None if admission.after is None else markers[admission.after],
                window=markers[window] if isinstance(window, str) else window,
            )
            for key, transform in zip(admission.tables, admission.transforms, strict=True)
        )

    def close(self, entry: RequestEntry, tokens: Sequence[int]) -> None:
        """Count a text that has ended without required text, or with forbidden text.

        A request that is preempted or cancelled has not ended.

        Args:
            entry: The request.
            tokens: All its generated tokens.
        """
        params, request, admission = entry.params, entry.request, entry.admission
        if request is None or admission is None or admission.after is not None or not tokens:
            return
        if tokens[-1] not in request.ends and len(tokens) < request.limit:
            text, stops = self.builder.spell(tokens), params.stop or []
            if not any(stop.encode() in text for stop in stops):
                return
        covered = tokens[: admission.window] if isinstance(admission.window, int) else tokens
        if all(_is_met(goal, covered, request.ends) for goal in request.goals):
            return
        metrics.UNMET.inc()
        if monotonic() - self._logged > SECONDS_BETWEEN_LOGS:
            self._logged = monotonic()
            goal = (params.extra_args or {}).get("goal")
            logger.warning("A text ended without required text", extra={"goal": goal})

    def update(
        self, num_rows: int, counts: Mapping[int, int], rows: Mapping[int, RequestEntry]
    ) -> "Step":
        """Find out which slots of a step lack one token, and which must be read.

        Args:
            num_rows: The number of rows of the logits.
            counts: The number of generated tokens of each row with a slot.
            rows: The slots of the rows whose prompt is complete and whose goals are loaded.
        """
        slots: list[int | None] = [None] * num_rows
        moved, new = [], []
        for row, entry in rows.items():
            slots[row] = entry.slot_id
            missing = entry.missing(counts[row])
            if missing == 1:
                moved.append(row)
            elif missing != 0:
                new.append(row)
            entry.num_generated = counts[row]
        return Step(slots, moved, new)

    def advance(self, step: "Step", tokens: Tensor) -> None:
        """Update the states of the rows that lack one token: (rows,) ids, on the device."""
        if not step.moved:
            return
        mask = None
        if len(step.moved) < sum(slot is not None for slot in step.slots):
            mask = torch.zeros(len(step.slots), dtype=torch.bool)
            mask[step.moved] = True
            mask = mask.to(tokens.device, non_blocking=True)
        self.steering.advance(step.slots, tokens, mask)

    def apply(self, logits: Tensor, slots: Sequence[int | None], failed: Sequence[int]) -> None:
        """Reweight the logits of rows in place: (rows, V or more).

        Args:
            logits: The logits.
            slots: The slot of each row; None if it is not steered.
            failed: Rows that may only end.
        """
        self.steering.observe = self.price_meter.next_step()
        self.steering.reweight_(logits, slots)
        if failed:
            rows, ends = (to_device(part, logits.device) for part in (failed, self.ends))
            logits[rows] = -torch.inf
            logits[rows[:, None], ends] = 0.0


class Step(NamedTuple):
    """The rows of a decoding step."""

    slots: list[int | None]
    """The slot of each row; None if it is not steered."""
    moved: list[int]
    """The rows that have one more token than their state."""
    new: list[int]
    """The rows whose state must be computed from all tokens."""


def _ends(config: "VllmConfig", hmm_ends: tuple[int, ...]) -> list[int]:
    """Return the tokens that end a text: the HMM's, or else the LM's."""
    lm_ends = getattr(config.model_config.hf_config, "eos_token_id", None)
    return list(hmm_ends) or ([lm_ends] if isinstance(lm_ends, int) else list(lm_ends or [0]))


def _check_model(config: "VllmConfig", hmm: HMM) -> None:
    """Refuse the HMM of another LM when the server starts."""
    from vllm.tokenizers import cached_tokenizer_from_config

    vocab_size = config.model_config.get_vocab_size()
    if hmm.vocab_size > vocab_size:
        raise InvalidInputError(
            f"The HMM has a vocabulary of {hmm.vocab_size} tokens, but the LM has {vocab_size}. "
            f"Use the HMM of this LM."
        )
    tokenizer = cached_tokenizer_from_config(config.model_config)
    if tokenizer is not None:
        known = hmm.config.tokenizer_fingerprint
        require_same_fingerprint("The HMM", known, fingerprint(tokenizer.get_vocab()))


def _is_met(goal: Goal, tokens: Sequence[int], ends: Sequence[int]) -> bool:
    """Return whether a text meets the constraint of a goal."""
    automaton = goal.lookahead.attribute.terms.automaton
    text = torch.tensor([token for token in tokens if token not in ends], dtype=torch.long)
    if automaton is None or not len(text):
        return automaton is None or bool((automaton.final_weights[:, 0] > 0).any())
    final_weights = automaton.log_final_weights(text, torch.zeros_like(text), 1)
    return bool((final_weights > -torch.inf).any())


def _add_marker(steering: SlotSteering, marker: Marker, compiled: CompiledMarker) -> None:
    """Copy a compiled marker into the pool of a steering, which would compile it otherwise."""
    pool = steering.pool.markers
    if marker in pool._entries:
        return
    in_use = {getattr(one.window, end) for one in steering._requests.values() for end in ENDS}
    for old in [*pool._automata][:-MAX_MARKERS]:
        if old not in in_use:
            entry, dfa = pool._entries.pop(old), pool._automata.pop(old)
            pool.classes.free(entry.classes, 1)
            pool.transitions.free(entry.transitions, dfa.transitions.numel())
    num_tokens, dfa = len(marker.token_bytes), compiled.dfa
    if pool.classes.rows.shape[1] < num_tokens:  # the first marker
        pool.classes = Slab((num_tokens,), torch.int16, pool.device)
        pool.classes.write(torch.zeros(1, num_tokens))
    classes = torch.zeros(1, num_tokens, dtype=torch.int16)
    classes[0, dfa.tokens.long()] = dfa.classes.short()
    pool._automata[marker] = dfa
    pool._entries[marker] = MarkerEntry(
        pool.classes.write(classes),
        pool.transitions.write(dfa.transitions.flatten()),
        dfa.transitions.shape[1],
        compiled.found,
    )
