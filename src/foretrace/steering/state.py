"""The state of all sequences of a batch, as tensors with one row per slot."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from foretrace.hmm import HMM, inference

NEVER = 1 << 40  # a position that no text reaches
READ_BACK = 128  # last prompt tokens that are read; earlier ones hardly affect the belief
MIN_LENGTH = 32  # positions of `seen_tokens`


class SlotCounters(NamedTuple):
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
    counters: Tensor  # (S, 5) int64, in the order of `SlotCounters`
    # Of the tokens in the window:
    log_past: Tensor  # (S, T) float64: sums of log-weights, for each term of the goals
    seen_tokens: Tensor  # (S, L) ids at their first position, if rewards count once; elsewhere V
    vocab_size: int  # V

    @classmethod
    def empty(cls, hmm: HMM) -> "SlotState":
        """Return the state of no slots."""
        integers = torch.zeros(0, len(SlotCounters._fields), dtype=torch.long, device=hmm.device)
        return cls(
            hmm.initial.new_zeros(0, hmm.num_states),
            integers,
            torch.zeros(0, 1, dtype=torch.float64, device=hmm.device),
            integers[:, :0],
            hmm.vocab_size,
        )

    def reserve(self, slots: int, terms: int, length: int) -> None:
        """Make room for so many slots, terms and positions.

        Positions that no sequence needs any more are given back.
        """
        current = len(self.counters)
        if slots > current:
            for name, tensor in self._tensors():
                larger = tensor.new_zeros(max(slots, 2 * current), *tensor.shape[1:])
                larger[:current] = tensor
                setattr(self, name, larger)
            self.seen_tokens[current:] = self.vocab_size
        if terms > self.log_past.shape[1]:
            added = terms - self.log_past.shape[1]
            self.log_past = torch.nn.functional.pad(self.log_past, (0, added))
        width = self.seen_tokens.shape[1]
        if length > width or 4 * max(length, MIN_LENGTH) <= width:
            wanted = max(2 * length, MIN_LENGTH) if length else 0
            padded = torch.nn.functional.pad(
                self.seen_tokens, (0, wanted - width), value=self.vocab_size
            )
            self.seen_tokens = padded.contiguous()

    def copy_(self, slots: Tensor, sources: Tensor) -> None:
        """Let each of the slots take the state of another: (n,) each."""
        for _, tensor in self._tensors():
            tensor[slots] = tensor[sources]

    def start_(self, slot: int, predicted: Tensor, begin: int, end: int) -> None:
        """Begin a sequence in a slot, before its first token."""
        self.predicted[slot] = predicted
        counters = torch.tensor([0, begin, end, 0, 0])
        self.counters[slot] = counters.to(self.counters.device, non_blocking=True)
        self.log_past[slot] = 0.0
        self.seen_tokens[slot] = self.vocab_size

    def _tensors(self) -> list[tuple[str, Tensor]]:
        """Return the names and values of all tensors."""
        return [(name, value) for name, value in vars(self).items() if isinstance(value, Tensor)]

    def counters_of(self, slots: Tensor) -> SlotCounters:
        """Return the integers of slots: (n,)."""
        return SlotCounters(*self.counters[slots].unbind(1))


def predict_after(hmm: HMM, tokens: Tensor, lengths: Tensor) -> Tensor:
    """Compute the distribution of the HMM state of the next token after prompts.

    The filter reads at most the last `READ_BACK` tokens of a prompt. It ignores the tokens up to
    the last end-of-text token, because they belong to an earlier text.

    Args:
        hmm: The HMM.
        tokens: Token ids of prompts, padded on the right, (n, T).
        lengths: The number of tokens of each prompt, (n,), on the CPU.

    Returns:
        Probabilities of shape (n, h).
    """
    device = hmm.device
    starts = (lengths - READ_BACK).clamp_min(0)
    width = int((lengths - starts).max())
    positions = starts[:, None] + torch.arange(width)  # on the CPU
    in_prompt = (positions < lengths[:, None]).to(device, non_blocking=True)
    index = positions.clamp_max(max(0, tokens.shape[1] - 1)).to(tokens.device, non_blocking=True)
    recent = tokens.gather(1, index).to(device)
    stops = torch.tensor(hmm.config.eos_token_ids, dtype=torch.long).to(device, non_blocking=True)
    is_end = torch.isin(recent, stops) & in_prompt
    in_earlier_text = is_end.flip(1).cumsum(1).flip(1) > 0
    mask = in_prompt & ~in_earlier_text & (recent < hmm.vocab_size)
    recent = recent.clamp_max(hmm.vocab_size - 1)
    predicted = hmm.initial.expand(len(tokens), -1)
    for filtered in inference.scan(hmm, recent, mask):
        predicted = filtered.predicted
    return predicted
