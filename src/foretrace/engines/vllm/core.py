"""The requests, goals and states of a vLLM batch, for the processors of both model runners."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from foretrace.engines.vllm import prometheus
from foretrace.engines.vllm.params import parse
from foretrace.engines.vllm.settings import open_table_cache
from foretrace.errors import ForetraceError, InvalidInputError
from foretrace.hmm import HMM
from foretrace.steering import Request, SlotSteering
from foretrace.steering.transfer import to_device
from foretrace.vocabulary import fingerprint, require_same_fingerprint

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

# Keys that validation adds to a request's arguments: the keys of its tables, the stop tokens that
# were added to it, and whether its tables are leased until it is answered.
TABLES, STOPS, LEASED = "foretrace_tables", "foretrace_stops", "foretrace_leased"


def validate_params(params: "SamplingParams") -> None:
    """Check a request, build its tables if no server does, and record them in its arguments.

    Runs in the process that takes requests.

    Raises:
        ForetraceError: The request cannot be steered.
    """
    _remove_added(params)
    try:
        steering_params = parse(params.extra_args)
        if steering_params is None:
            return
        cache = open_table_cache(torch.device("cpu"), prometheus.observe_cache)
        keys = cache.admit(steering_params, params.max_tokens)
        if params.structured_outputs is not None and cache.has_constraint(keys):
            raise InvalidInputError(
                "A request with structured outputs cannot also have required or forbidden texts: "
                "the grammar may leave no token that satisfies both. Put the texts into the "
                "schema, or leave one of the two out."
            )
    except ForetraceError:
        prometheus.REFUSED.inc()
        raise
    stops = [] if params.ignore_eos else _add_stops(params, cache.hmm.config.eos_token_ids)
    # The server's middleware leases the tables: they cannot be evicted before decoding.
    leased = {LEASED: True} if cache.read_only else {}
    params.extra_args = {**params.extra_args, TABLES: keys, STOPS: stops, **leased}


def _add_stops(params: "SamplingParams", ends: tuple[int, ...]) -> list[int]:
    """Add the HMM's end-of-text tokens to the stop tokens; return those that were added."""
    stops = params.stop_token_ids or []
    added = [end for end in ends if end not in stops]
    params.stop_token_ids = [*stops, *added]
    params.all_stop_token_ids.update(added)
    return added


def _remove_added(params: "SamplingParams") -> None:
    """Undo an earlier validation: a caller may send the same object again with other arguments."""
    extra_args = dict(params.extra_args or {})
    stops = extra_args.pop(STOPS, None)
    for key in (TABLES, LEASED):
        extra_args.pop(key, None)
    if isinstance(stops, list):
        params.stop_token_ids = [stop for stop in params.stop_token_ids or [] if stop not in stops]
        params.all_stop_token_ids.difference_update(stops)
    if params.extra_args is not None:
        params.extra_args = extra_args


@dataclass
class Slot:
    """A request of the batch."""

    params: "SamplingParams"
    prompt: list[int] | None
    """Token ids of the prompt, where the runner has them on the host."""
    prompt_length: int
    output: list[int]
    """Generated token ids, updated by runner V1; runner V2 has them on the device."""
    number: int
    """The number of its slot in the steering."""
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
        self.cache = open_table_cache(device, prometheus.observe_cache)
        _check_model(vllm_config, self.cache.hmm)
        self.cache.load_tokenizer()  # markers need it, and a request must not hold up the batch
        self.max_length = int(vllm_config.model_config.max_model_len)
        # With drafts, a step advances the rows after as many drafted tokens, and reweights all.
        num_plans = num_drafts + 2 if num_drafts else 1
        self.steering = SlotSteering(self.cache.hmm, num_plans=num_plans)
        self.price_meter = prometheus.PriceMeter()
        self.ends = _ends(vllm_config, self.cache.hmm.config.eos_token_ids)

    def open(self, slot: Slot, *, resumed: bool) -> Slot | None:
        """Load the goals of a request that enters the batch; return None if it has none."""
        self.load(slot)
        if slot.request is None and not slot.failed:
            return None
        if not resumed and not slot.failed:
            prometheus.REQUESTS.inc()
        return slot

    def load(self, slot: Slot) -> None:
        """Load the goals of a slot, or mark it as failed."""
        try:
            slot.request = self._request(slot)
        except Exception as error:
            self.fail(slot, str(error), error)

    def fail(self, slot: Slot, reason: str, error: Exception | None = None) -> None:
        """Mark a slot as failed: its request ends with the next token."""
        logger.error(
            "A request cannot be steered, and is ended: %s",
            reason,
            exc_info=error,
            extra={"goal": (slot.params.extra_args or {}).get("goal")},
        )
        prometheus.FAILED.inc()
        slot.failed = True

    def _request(self, slot: Slot) -> Request | None:
        params, extra_args = slot.params, slot.params.extra_args or {}
        steering_params = parse(extra_args)
        if steering_params is None:
            return None
        keys = extra_args.get(TABLES) or self.cache.admit(steering_params)
        # A server's decoding process never builds: that would hold up the whole batch.
        build = not extra_args.get(LEASED, False)
        goals = self.cache.goals(steering_params, keys, build=build)
        limit = min(params.max_tokens or self.max_length, self.max_length - slot.prompt_length)
        ends = tuple(params.all_stop_token_ids)
        return Request(goals, tuple(slot.prompt or ()), limit, steering_params.horizon, ends)

    def update(self, num_rows: int, counts: Mapping[int, int], rows: Mapping[int, Slot]) -> "Step":
        """Find out which slots of a step lack one token, and which must be read.

        Args:
            num_rows: The number of rows of the logits.
            counts: The number of generated tokens of each row with a slot.
            rows: The slots of the rows whose prompt is complete and whose goals are loaded.
        """
        numbers: list[int | None] = [None] * num_rows
        moved, new = [], []
        for row, slot in rows.items():
            numbers[row] = slot.number
            missing = slot.missing(counts[row])
            if missing == 1:
                moved.append(row)
            elif missing != 0:
                new.append(row)
            slot.num_generated = counts[row]
        return Step(numbers, moved, new)

    def advance(self, step: "Step", tokens: Tensor) -> None:
        """Update the states of the rows that lack one token: (rows,) ids, on the device."""
        if not step.moved:
            return
        mask = None
        if len(step.moved) < sum(number is not None for number in step.numbers):
            mask = torch.zeros(len(step.numbers), dtype=torch.bool)
            mask[step.moved] = True
            mask = mask.to(tokens.device, non_blocking=True)
        self.steering.advance(step.numbers, tokens, mask)

    def apply(self, logits: Tensor, numbers: Sequence[int | None], failed: Sequence[int]) -> None:
        """Reweight the logits of rows in place: (rows, V or more).

        Args:
            logits: The logits.
            numbers: The slot number of each row; None if it is not steered.
            failed: Rows that may only end.
        """
        self.steering.observe = self.price_meter.next_step()
        self.steering.reweight_(logits, numbers)
        if failed:
            rows, ends = (to_device(part, logits.device) for part in (failed, self.ends))
            logits[rows] = -torch.inf
            logits[rows[:, None], ends] = 0.0


class Step(NamedTuple):
    """The rows of a decoding step."""

    numbers: list[int | None]
    """The slot number of each row; None if it is not steered."""
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
