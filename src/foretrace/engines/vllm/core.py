"""The requests, goals and states of a vLLM batch, for the processors of both model runners."""

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from foretrace.attribute import LogitAffine
from foretrace.context import Probe
from foretrace.engines.vllm import metrics
from foretrace.engines.vllm.params import ADMISSION, Admission, names_goal, parse
from foretrace.engines.vllm.settings import Settings, open_builder
from foretrace.engines.vllm.table_store import TableLoader
from foretrace.errors import ForetraceError, InvalidInputError
from foretrace.hmm import HMM
from foretrace.lookahead import Lookahead
from foretrace.steering import CompiledGoal, Marker, Request, Steering
from foretrace.steering.batch_index import to_device
from foretrace.steering.goal import Factor
from foretrace.steering.markers import CompiledMarker, Window
from foretrace.vocabulary import fingerprint, require_same_fingerprint

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

Loading = Future[dict[str, Lookahead | CompiledMarker]]

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
    loading: Loading | None = None
    """The tables and markers that the steering does not have yet."""
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
        goal = None if self.request is None else self.request.goal
        return goal is not None and any(one.lookahead.has_constraint for one in goal.factors)


class SteeringCore:
    """Loads the goals of requests, and steers their rows in one batch of tensor operations."""

    def __init__(self, vllm_config: "VllmConfig", device: torch.device) -> None:
        """Load the HMM of a server.

        Args:
            vllm_config: The settings of vLLM.
            device: Where logits are.
        """
        self.builder = open_builder(device, metrics.observe_cache)
        self.hmm = self.builder.hmm
        _check_model(vllm_config, self.hmm, self.builder.probe)
        self.builder.load_tokenizer()  # markers need it, and a request must not hold up the batch
        self.max_length = int(vllm_config.model_config.max_model_len)
        self.loader = TableLoader(self.builder.store, self.hmm, self.builder.horizon)
        self.steering = Steering(self.hmm, memory=Settings.from_environment().memory_mb << 20)
        self.price_counter = metrics.PriceCounter()
        self.unreadable_counter = metrics.UnreadableCounter(self.steering)
        self.ends = _ends(vllm_config, self.hmm.config.eos_token_ids)
        self._logged = -SECONDS_BETWEEN_LOGS

    def open(self, entry: RequestEntry, *, resumed: bool) -> RequestEntry | None:
        """Begin to load the goals of a request that enters the batch; None if it has none."""
        extra_args = entry.params.extra_args or {}
        if ADMISSION in extra_args:
            entry.admission = Admission.from_plain(extra_args[ADMISSION])
            entry.loading = self._prefetch(entry.admission)
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

    def _prefetch(self, admission: Admission) -> Loading:
        """Begin to load what the steering does not have."""
        pool = self.steering.pool
        tables = [key for key in admission.tables if pool.find(key) is None]
        metrics.MISSES.inc(len(tables))
        metrics.HITS.inc(len(admission.tables) - len(tables))
        markers = self._markers(admission)
        missing = {
            key: markers[text]
            for text, key in admission.markers.items()
            if pool.find(markers[text].key) is None
        }
        return self.loader.prefetch(tables, missing)

    def _markers(self, admission: Admission) -> dict[str, Marker]:
        return {text: self.builder.marker(text) for text in admission.markers}

    def _request(self, entry: RequestEntry) -> Request:
        params, admission = entry.params, entry.admission
        assert admission is not None
        try:
            goal = self._goal(admission, entry.loading)
        except ForetraceError:
            # A server's decoding process never builds: that would hold up the whole batch. A
            # request keeps the attributes it was admitted with: others are not built for it.
            steering_params = None if admission.leased else parse(params.extra_args)
            if (
                steering_params is None
                or self.builder.build(steering_params).keys != admission.keys
            ):
                raise
            goal = self._goal(admission, None)
        finally:
            entry.loading = None
        limit = min(params.max_tokens or self.max_length, self.max_length - entry.prompt_length)
        stop_ids = tuple(params.all_stop_token_ids)
        return Request(goal, tuple(entry.prompt or ()), limit, admission.horizon, stop_ids)

    def _goal(self, admission: Admission, loading: Loading | None) -> CompiledGoal:
        """Return the goal of a request, from what the steering has and what was loaded."""
        loaded = (loading or self._prefetch(admission)).result()
        pool, markers = self.steering.pool, self._markers(admission)
        # Something that the steering had may have made room for something else meanwhile.
        parts: dict[str, Any] = {}
        names = {key: markers[text].key for text, key in admission.markers.items()}
        for key in admission.keys:
            parts[key] = loaded.get(key) or pool.find(names.get(key, key))
        if gone := [key for key, part in parts.items() if part is None]:
            tables = [key for key in gone if key not in names]
            again = {admission.markers[text]: marker for text, marker in markers.items()}
            missing = {key: again[key] for key in gone if key in names}
            parts |= self.loader.prefetch(tables, missing).result()
        window = admission.window
        return CompiledGoal(
            self.hmm,
            tuple(
                Factor(key, parts[key], LogitAffine(*transform))
                for key, transform in zip(admission.tables, admission.transforms, strict=True)
            ),
            Window(
                None if admission.after is None else parts[admission.markers[admission.after]],
                parts[admission.markers[window]] if isinstance(window, str) else window,
            ),
            admission.neutral_end,
            self.builder.probe,
        )

    def start(self, entries: Sequence[RequestEntry]) -> None:
        """Compute the states of requests from their tokens on the host."""
        requests = {one.slot_id: one.request for one in entries if one.request is not None}
        self.steering.start(requests, {one.slot_id: one.output for one in entries})
        for one in entries:  # the steering has the tables now
            one.request = self.steering.request(one.slot_id)

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
        if tokens[-1] not in request.stop_ids and len(tokens) < request.limit:
            text, stops = self.builder.spell(tokens), params.stop or []
            if not any(stop.encode() in text for stop in stops):
                return
        covered = tokens[: admission.window] if isinstance(admission.window, int) else tokens
        text_tokens = [token for token in covered if token not in request.stop_ids]
        if request.goal is None or request.goal.is_met(text_tokens):
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
        mask, new = None, set(step.new)
        slots = [None if row in new else slot for row, slot in enumerate(step.slots)]
        if len(step.moved) < sum(slot is not None for slot in slots):
            mask = torch.zeros(len(slots), dtype=torch.bool)
            mask[step.moved] = True
            mask = mask.to(tokens.device, non_blocking=True)
        self.steering.advance(slots, tokens, mask)

    def apply(self, logits: Tensor, slots: Sequence[int | None], failed: Sequence[int]) -> None:
        """Reweight the logits of rows in place: (rows, V or more).

        Args:
            logits: The logits.
            slots: The slot of each row; None if it is not steered.
            failed: Rows that may only end.
        """
        prices = self.steering.reweight_(logits, slots, measure=self.price_counter.is_due())
        self.unreadable_counter.step()
        if prices is not None:
            self.price_counter.add(*prices)
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


def _check_model(config: "VllmConfig", hmm: HMM, probe: Probe | None) -> None:
    """Refuse the HMM or the probe of another LM when the server starts."""
    from vllm.tokenizers import cached_tokenizer_from_config

    vocab_size = config.model_config.get_vocab_size()
    if hmm.vocab_size > vocab_size:
        raise InvalidInputError(
            f"The HMM has a vocabulary of {hmm.vocab_size} tokens, but the LM has {vocab_size}. "
            f"Use the HMM of this LM."
        )
    if probe is not None:
        found = (config.model_config.get_hidden_size(), vocab_size)
        expected = (len(probe.inverse), probe.vocab_size)
        if found[0] != expected[0] or found[1] < expected[1]:
            raise InvalidInputError(
                f"The probe reads hidden states of {expected[0]} numbers from {expected[1]} "
                f"logits, but the LM has {found[0]} and {found[1]}. Make the probe of this LM "
                f"with `foretrace probe LM --out FILE`."
            )
    tokenizer = cached_tokenizer_from_config(config.model_config)
    if tokenizer is not None:
        known = hmm.config.tokenizer_fingerprint
        require_same_fingerprint("The HMM", known, fingerprint(tokenizer.get_vocab()))
