"""The state of a slot from the tokens of its sequence: when it is new, or after preemption."""

import torch
from torch import Tensor

from foretrace.hmm import HMM, inference
from foretrace.steering.plan import NEVER
from foretrace.steering.pool import TablePool
from foretrace.steering.request import Request
from foretrace.steering.slot_state import SlotState
from foretrace.steering.transfer import to_device
from foretrace.steering.window import WindowState

READ_BACK = 128  # last prompt tokens that are read; earlier ones hardly affect the belief


def predict_after(hmm: HMM, tokens: Tensor, prompt_lengths: Tensor, lengths: Tensor) -> Tensor:
    """Compute the distribution of the HMM state of the next token.

    The filter reads at most the last `READ_BACK` tokens of a prompt, and all generated tokens: a
    sequence that was preempted continues in the state that it had. It ignores the tokens of a
    prompt up to the last end-of-text token, because they belong to an earlier text.

    Args:
        hmm: The HMM.
        tokens: Token ids of prompts and generated tokens, padded on the right, (n, T).
        prompt_lengths: The number of prompt tokens of each sequence, (n,), on the CPU.
        lengths: The number of prompt and generated tokens of each, (n,), on the CPU.

    Returns:
        Probabilities of shape (n, h).
    """
    device = hmm.device
    starts = (prompt_lengths - READ_BACK).clamp_min(0)
    width = int((lengths - starts).max())
    positions = starts[:, None] + torch.arange(width)  # on the CPU
    in_sequence = (positions < lengths[:, None]).to(device, non_blocking=True)
    in_prompt = (positions < prompt_lengths[:, None]).to(device, non_blocking=True)
    index = positions.clamp_max(max(0, tokens.shape[1] - 1)).to(tokens.device, non_blocking=True)
    recent = tokens.gather(1, index).to(device)
    ends = torch.tensor(hmm.config.eos_token_ids, dtype=torch.long).to(device, non_blocking=True)
    is_prompt_end = torch.isin(recent, ends) & in_prompt
    in_earlier_text = is_prompt_end.flip(1).cumsum(1).flip(1) > 0
    mask = in_sequence & ~in_earlier_text & (recent < hmm.vocab_size)
    recent = recent.clamp_max(hmm.vocab_size - 1)
    predicted = hmm.initial.expand(len(tokens), -1)
    for filtered in inference.scan(hmm, recent, mask):
        predicted = filtered.predicted
    return predicted


def write_slot(
    state: SlotState,
    slot: int,
    request: Request,
    pool: TablePool,
    prompt: Tensor,
    generated: Tensor,
) -> None:
    """Write all of a slot but the belief, from the prompt and the generated tokens: (T,) each."""
    window, marker_state = WindowState(0, 0, request.window.length), 0
    if request.window.has_marker:
        window = request.window.read(prompt.tolist(), generated.tolist())
        marker = request.window.pending(window)
        if marker is not None:
            searched = generated[window.begin or 0 :].tolist()
            marker_state = pool.markers.state_after(marker, searched)
    inside = window.select(generated).to(pool.hmm.device)
    begin, end = (NEVER if part is None else part for part in (window.begin, window.end))
    numbers = [len(generated), begin, end, marker_state, 0]
    state.numbers[slot] = to_device(numbers, pool.hmm.device)
    _write_goals(state, slot, request, inside)
    if request.counts_once:
        distinct = list(dict.fromkeys(inside[inside < pool.hmm.vocab_size].tolist()))
        state.distinct[slot] = pool.hmm.vocab_size
        state.distinct[slot, : len(distinct)] = to_device(distinct, pool.hmm.device)


def _write_goals(state: SlotState, slot: int, request: Request, tokens: Tensor) -> None:
    """Write the pasts and the automaton state of a slot after tokens of the window: (T,)."""
    state.log_past[slot] = 0.0
    past = 0
    for goal in request.goals:
        lookahead = goal.lookahead
        next_past = past + len(lookahead.terms)
        state.log_past[slot, past:next_past] = lookahead.log_weights(tokens).sum(0)
        if lookahead.automaton is not None:
            state.numbers[slot, -1:] = lookahead.automaton.run(tokens)
        past = next_past
