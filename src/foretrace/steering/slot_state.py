"""The state of all sequences of a batch, as tensors with one row per slot."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from foretrace.hmm import HMM, inference
from foretrace.steering.automaton_plan import AutomatonRows
from foretrace.steering.marker_plan import MarkerPlan
from foretrace.steering.plan import NEVER, Plan
from foretrace.steering.planned import GoalKind
from foretrace.steering.pool import TablePool


class SlotNumbers(NamedTuple):
    """Integers of slots: (n,) each. A position is a number of generated tokens, or `NEVER`."""

    num_generated: Tensor
    begin: Tensor  # position at which the window begins
    end: Tensor  # position at which the window ends
    marker_state: Tensor  # state of the search for the next marker
    automaton_state: Tensor  # after the tokens in the window

    @property
    def in_window(self) -> Tensor:
        """Whether the goals are about the next token: (n,) bool."""
        return (self.begin <= self.num_generated) & (self.num_generated < self.end)


@dataclass
class SlotState:
    """What steering depends on and every token changes: S slots, on the HMM's device."""

    predicted: Tensor  # (S, h): p(HMM state of the next token | prompt and generated tokens)
    numbers: Tensor  # (S, 5) int64, in the order of `SlotNumbers`
    # Of the tokens in the window:
    log_past: Tensor  # (S, T) float64: sums of log-weights, for each term of the goals
    distinct: Tensor  # (S, L) ids at their first position, if rewards count once; elsewhere V
    vocab_size: int  # V

    @classmethod
    def empty(cls, hmm: HMM) -> "SlotState":
        """Return the state of no slots."""
        integers = torch.zeros(0, len(SlotNumbers._fields), dtype=torch.long, device=hmm.device)
        return cls(
            hmm.initial.new_zeros(0, hmm.num_states),
            integers,
            torch.zeros(0, 1, dtype=torch.float64, device=hmm.device),
            integers[:, :0],
            hmm.vocab_size,
        )

    def reserve(self, slots: int, terms: int, length: int) -> None:
        """Grow so that there are as many slots, terms and positions at least."""
        current = len(self.numbers)
        if slots > current:
            for name, tensor in self._tensors():
                larger = tensor.new_zeros(max(slots, 2 * current), *tensor.shape[1:])
                larger[:current] = tensor
                setattr(self, name, larger)
        if terms > self.log_past.shape[1]:
            added = terms - self.log_past.shape[1]
            self.log_past = torch.nn.functional.pad(self.log_past, (0, added))
        if length > self.distinct.shape[1]:
            added = max(length, 2 * self.distinct.shape[1]) - self.distinct.shape[1]
            self.distinct = torch.nn.functional.pad(
                self.distinct, (0, added), value=self.vocab_size
            )

    def copy_(self, slots: Tensor, sources: Tensor) -> None:
        """Let each of the slots take the state of another: (n,) each."""
        for _, tensor in self._tensors():
            tensor[slots] = tensor[sources]

    def _tensors(self) -> list[tuple[str, Tensor]]:
        """Return the names and values of all tensors."""
        return [(name, value) for name, value in vars(self).items() if isinstance(value, Tensor)]

    def numbers_of(self, slots: Tensor) -> SlotNumbers:
        """Return the integers of slots: (n,)."""
        return SlotNumbers(*self.numbers[slots].unbind(1))


def advance(
    state: SlotState, plan: Plan, pool: TablePool, tokens: Tensor, moved: Tensor | None
) -> None:
    """Update the slots of a plan by one token each, in place.

    Args:
        state: The state.
        plan: The plan of the rows.
        pool: The pool that the plan refers to.
        tokens: The token of each row of the plan, (n,), on the device. Tokens outside the HMM's
            vocabulary leave its belief unchanged.
        moved: Which of the rows have a new token, (n,) bool; None for all of them.
    """
    slots, hmm = plan.rows.slots, pool.hmm
    is_known = tokens < hmm.vocab_size
    known = tokens.clamp_max(hmm.vocab_size - 1)
    changes = is_known if moved is None else is_known & moved
    before = state.predicted[slots]
    stepped = inference.step(hmm, before, known).predicted
    state.predicted[slots] = torch.where(changes.unsqueeze(-1), stepped, before)
    numbers = state.numbers_of(slots)
    inside = numbers.in_window if moved is None else numbers.in_window & moved
    counted = inside & is_known
    _add_to_past_(state, plan, pool, known, counted)
    if plan.once is not None:
        _remember_(state, slots, numbers.num_generated, known, counted)
    if plan.automata is not None:
        numbers = _step_automata(numbers, plan.automata, pool, known, is_known, inside)
    after = numbers.num_generated + 1 if moved is None else numbers.num_generated + moved
    numbers = numbers._replace(num_generated=after)
    if plan.markers is not None:
        numbers = _search_markers(numbers, plan.markers, pool, tokens, moved)
    state.numbers[slots] = torch.stack(numbers, 1)


def _remember_(
    state: SlotState, slots: Tensor, position: Tensor, tokens: Tensor, counted: Tensor
) -> None:
    """Write tokens that occur for the first time at their position."""
    is_first = (state.distinct[slots] != tokens.unsqueeze(1)).all(1) & counted
    position = position.clamp_max(state.distinct.shape[1] - 1)
    state.distinct[slots, position] = torch.where(is_first, tokens, state.vocab_size)


def _add_to_past_(
    state: SlotState, plan: Plan, pool: TablePool, tokens: Tensor, counted: Tensor
) -> None:
    """Add the log-weights of tokens to the past of every term."""
    columns = plan.columns
    weights = pool.weights.rows[columns.weights, tokens[columns.rows]].double()  # (C,)
    for group in plan.groups:
        if group.kind == GoalKind.LINEAR:
            weights[group.columns] = weights[group.columns].log()
        elif group.kind == GoalKind.COMPLEMENT:
            weights[group.columns] = (-weights[group.columns]).log1p()
    added = torch.where(counted[columns.rows], weights, 0.0)
    state.log_past.view(-1).index_add_(0, columns.past, added)


def _step_automata(
    numbers: SlotNumbers,
    rows: AutomatonRows,
    pool: TablePool,
    tokens: Tensor,
    is_known: Tensor,
    inside: Tensor,
) -> SlotNumbers:
    """Move the automata of rows by their tokens; unknown tokens are of class 0."""
    classes = pool.classes.rows[rows.classes, tokens[rows.rows]].long()
    classes = torch.where(is_known[rows.rows], classes, 0)
    before = numbers.automaton_state[rows.rows]
    after = pool.transitions.rows[rows.transitions + before * rows.num_classes + classes]
    after = torch.where(inside[rows.rows], after, before)
    return numbers._replace(automaton_state=numbers.automaton_state.index_copy(0, rows.rows, after))


def _search_markers(
    numbers: SlotNumbers,
    markers: MarkerPlan,
    pool: TablePool,
    tokens: Tensor,
    moved: Tensor | None,
) -> SlotNumbers:
    """Advance the search for markers; the count includes the tokens."""
    count, begin, end, before = numbers[:4]
    is_beginning = begin == NEVER
    classes_row, transitions, num_classes, found = (
        torch.where(is_beginning, *pair) for pair in zip(markers[:4], markers[4:8], strict=True)
    )
    classes = pool.markers.classes.rows
    is_listed = tokens < classes.shape[1]
    token_class = classes[classes_row, torch.where(is_listed, tokens, 0)].long()
    after = pool.markers.transitions.rows[transitions + before * num_classes + token_class]
    after = torch.where(is_listed, after, before)  # other tokens have no bytes
    searching = (found >= 0) & (is_beginning | (end == NEVER))
    if moved is not None:
        searching = searching & moved
    is_found = searching & (after == found)
    begins, ends = is_found & is_beginning, is_found & ~is_beginning
    after_length = torch.where(markers.length >= 0, count + markers.length, NEVER)
    return numbers._replace(
        begin=torch.where(begins, count, begin),
        end=torch.where(begins, after_length, torch.where(ends, count, end)),
        marker_state=torch.where(is_found, 0, torch.where(searching, after, before)),
    )
