"""Update the state of sequences by one token each."""

import torch
from torch import Tensor

from foretrace.hmm import inference
from foretrace.lookahead.kernels import EapKind
from foretrace.steering.batch_index import AutomatonRows, BatchIndex, MarkerIndex
from foretrace.steering.pool import TablePool
from foretrace.steering.state import NEVER, SlotCounters, SlotState


def advance(
    state: SlotState, index: BatchIndex, pool: TablePool, tokens: Tensor, moved: Tensor | None
) -> None:
    """Update the slots of an index by one token each, in place.

    Args:
        state: The state.
        index: The index of the rows.
        pool: The pool that the index refers to.
        tokens: The token of each row of the index, (n,), on the device. Tokens outside the HMM's
            vocabulary leave its belief unchanged.
        moved: Which of the rows have a new token, (n,) bool; None for all of them.
    """
    slots, hmm = index.rows.slots, pool.hmm
    is_known = tokens < hmm.vocab_size
    known = tokens.clamp_max(hmm.vocab_size - 1)
    changes = is_known if moved is None else is_known & moved
    before = state.predicted[slots]
    stepped = inference.step(hmm, before, known).predicted
    state.predicted[slots] = torch.where(changes.unsqueeze(-1), stepped, before)
    counters = state.counters_of(slots)
    inside = counters.in_window if moved is None else counters.in_window & moved
    counted = inside & is_known
    _add_to_past_(state, index, pool, known, counted)
    if index.first_only is not None:
        _remember_(state, slots, counters.num_generated, known, counted)
    if index.automata is not None:
        counters = _step_automata(counters, index.automata, pool, known, counted)
    after = counters.num_generated + 1 if moved is None else counters.num_generated + moved
    counters = counters._replace(num_generated=after)
    if index.markers is not None:
        counters = _search_markers(counters, index.markers, pool, tokens, moved)
    state.counters[slots] = torch.stack(counters, 1)


def _remember_(
    state: SlotState, slots: Tensor, position: Tensor, tokens: Tensor, counted: Tensor
) -> None:
    """Write tokens that occur for the first time at their position."""
    is_first = (state.seen_tokens[slots] != tokens.unsqueeze(1)).all(1) & counted
    position = position.clamp_max(state.seen_tokens.shape[1] - 1)
    state.seen_tokens[slots, position] = torch.where(is_first, tokens, state.vocab_size)


def _add_to_past_(
    state: SlotState, index: BatchIndex, pool: TablePool, tokens: Tensor, counted: Tensor
) -> None:
    """Add the log-weights of tokens to the past of every term."""
    columns = index.columns
    weights = pool.weights.data[columns.weights, tokens[columns.rows]].double()  # (C,)
    for group in index.groups:
        if group.kind == EapKind.LINEAR:
            weights[group.columns] = weights[group.columns].log()
        elif group.kind == EapKind.ONE_MINUS:
            weights[group.columns] = (-weights[group.columns]).log1p()
    added = torch.where(counted[columns.rows], weights, 0.0)
    state.log_past.view(-1).index_add_(0, columns.past, added)


def _step_automata(
    counters: SlotCounters,
    rows: AutomatonRows,
    pool: TablePool,
    tokens: Tensor,
    counted: Tensor,
) -> SlotCounters:
    """Move the automata of rows by the tokens that count."""
    classes = pool.classes.data[rows.classes, tokens[rows.rows]].long()
    before = counters.automaton_state[rows.rows]
    after = pool.transitions.data[rows.transitions + before * rows.num_classes + classes]
    after = torch.where(counted[rows.rows], after, before)
    states = counters.automaton_state.index_copy(0, rows.rows, after)
    return counters._replace(automaton_state=states)


def _search_markers(
    counters: SlotCounters,
    markers: MarkerIndex,
    pool: TablePool,
    tokens: Tensor,
    moved: Tensor | None,
) -> SlotCounters:
    """Advance the search for markers; the count includes the tokens."""
    count, begin, end, before = counters[:4]
    is_beginning = begin == NEVER
    classes_row, transitions, num_classes, found = (
        torch.where(is_beginning, *pair) for pair in zip(markers[:4], markers[4:8], strict=True)
    )
    classes = pool.marker_classes.data
    is_listed = tokens < classes.shape[1]
    token_class = classes[classes_row, torch.where(is_listed, tokens, 0)].long()
    after = pool.marker_transitions.data[transitions + before * num_classes + token_class]
    after = torch.where(is_listed, after, before)  # other tokens have no bytes
    searching = (found >= 0) & (is_beginning | (end == NEVER))
    if moved is not None:
        searching = searching & moved
    is_found = searching & (after == found)
    begins, ends = is_found & is_beginning, is_found & ~is_beginning
    after_length = torch.where(markers.length >= 0, count + markers.length, NEVER)
    return counters._replace(
        begin=torch.where(begins, count, begin),
        end=torch.where(begins, after_length, torch.where(ends, count, end)),
        marker_state=torch.where(is_found, 0, torch.where(searching, after, before)),
    )
