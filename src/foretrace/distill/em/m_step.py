"""The M-step: a moving average of expected counts, and the probabilities that it implies.

Mini-batch EM keeps counts = (1 - step) * counts + step * new. In the (V, h) emission counts, only
the rows of tokens in the batch change; all others shrink by a common factor. The factor is stored
separately, so that the cost of a step does not grow with the vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from foretrace.distill.em.e_step import BatchCounts, BatchParameters, Workspace
from foretrace.hmm import HMM, HMMConfig
from foretrace.hmm.probability import CHUNK_ELEMENTS, emit_only_ends_

SMALLEST_FACTOR = 1e-15  # below this, multiply the factor in: about once in 35 steps


@dataclass
class Counts:
    """Expected counts per sequence, with a pseudocount that keeps unseen events possible.

    With an `eos_token_id`, the last state is absorbing, and it alone emits that token and the
    other ends of texts, which do not occur in rows. Both hold exactly; they are not learnt.
    """

    initial: Tensor  # (h,)
    transition: Tensor  # (h, h)
    emission: Tensor  # (V, h): multiply by `factor`
    total: Tensor  # (h,): sums of the emission counts of each state, with the factor
    pseudocount: float
    eos_token_id: int | None
    factor: float = 1.0
    other_ends: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self._workspace = Workspace(self.emission)

    @classmethod
    def from_hmm(
        cls, hmm: HMM, length: int, *, pseudocount: float, ends: Sequence[int] = ()
    ) -> Self:
        """Build counts that reproduce an HMM, as if every state had been visited equally often.

        The ends of texts may differ from the HMM's, as in chats: only the last state emits them
        then.
        """
        states, vocab = hmm.num_states, hmm.vocab_size
        visits = length / states
        identity = torch.eye(states, dtype=hmm.initial.dtype, device=hmm.device)
        emission = torch.empty(vocab, states, dtype=hmm.initial.dtype, device=hmm.device)
        step = max(1, CHUNK_ELEMENTS // states)
        for tokens in torch.split(torch.arange(vocab, device=hmm.device), step):
            emission[tokens] = hmm.emission.of_tokens(tokens) * visits
        emission[list(ends), :-1] = 0.0
        return cls(
            initial=hmm.initial.clone(),
            transition=hmm.transition.predict(identity) * visits,
            emission=emission,
            total=emission.sum(0),
            pseudocount=pseudocount,
            eos_token_id=ends[0] if ends else None,
            other_ends=tuple(ends[1:]),
        )

    @property
    def num_text_tokens(self) -> int:
        """The number of tokens that states other than the end-of-text state can emit."""
        return len(self.emission) - (self.eos_token_id is not None) - len(self.other_ends)

    def parameters(self, tokens: Tensor) -> BatchParameters:
        """Compute the probabilities of the (U,) tokens of a batch.

        The rows overwrite the rows of the previous call.
        """
        rows = self._workspace.buffer("rows", len(tokens), len(self.total))
        torch.index_select(self.emission, 0, tokens, out=rows)
        scale = _positive(self.total + self.num_text_tokens * self.pseudocount).reciprocal()
        torch.addcmul(self.pseudocount * scale, rows, self.factor * scale, out=rows)
        transition = self.transition + self.pseudocount
        if self.eos_token_id is not None:
            rows[:, -1] = 0.0
            rows[tokens == self.eos_token_id] = _last_state(rows[0])
            transition[-1] = _last_state(transition[-1])
        transition /= _positive(transition.sum(-1, keepdim=True))
        initial = self.initial + self.pseudocount
        return BatchParameters(initial / initial.sum(), transition, rows)

    def update(self, tokens: Tensor, batch: BatchCounts, step: float) -> None:
        """Multiply the counts by 1 - step, and add the batch's counts per sequence, times step."""
        sequences = float(batch.summary[1])
        if sequences == 0:  # all sequences are impossible
            return
        weight = step / sequences
        self._decay(1 - step)
        self.initial.mul_(1 - step).add_(batch.initial, alpha=weight)
        self.transition.mul_(1 - step).add_(batch.transition, alpha=weight)
        self.total.mul_(1 - step).add_(batch.rows.sum(0), alpha=weight)
        self.emission.index_add_(0, tokens, batch.rows, alpha=weight / self.factor)

    def _decay(self, by: float) -> None:
        self.factor *= by
        if self.factor < SMALLEST_FACTOR:
            self.emission.mul_(self.factor)
            self.factor = 1.0

    def to_hmm(self, config: HMMConfig) -> HMM:
        """Build the HMM. It reuses the emission table in place, so the counts are invalid after."""
        parameters = self.parameters(torch.zeros(1, dtype=torch.long, device=self.emission.device))
        table = self.emission.mul_(self.factor).add_(self.pseudocount)
        if self.eos_token_id is not None:
            table = emit_only_ends_(table, (self.eos_token_id, *self.other_ends))
        # Without a pseudocount, a state may have no counts: it emits every token equally.
        totals = table.sum(0)
        table[:, totals == 0] = 1 / len(table)
        table.div_(table.sum(0))
        return HMM(parameters.initial, _stochastic(parameters.transition), table, config)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint by name."""
        return {
            "initial": self.initial,
            "transition": self.transition,
            "emission": self.emission,
            "total": self.total,
            "factor": self.total.new_tensor(self.factor, dtype=torch.float64),
        }

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors of a checkpoint into the counts."""
        for name in ("initial", "transition", "emission", "total"):
            getattr(self, name).copy_(tensors[name])
        self.factor = float(tensors["factor"])


def _positive(totals: Tensor) -> Tensor:
    """Bound totals away from 0, so that 0 / total is 0 and not NaN."""
    return totals.clamp_min(torch.finfo(totals.dtype).tiny)


def _last_state(like: Tensor) -> Tensor:
    """Return the distribution that is concentrated on the last state: (..., h)."""
    distribution = torch.zeros_like(like)
    distribution[..., -1] = 1.0
    return distribution


def _stochastic(transition: Tensor) -> Tensor:
    """Add a self-transition to states without outgoing counts."""
    empty = transition.sum(-1) == 0
    transition[empty, empty.nonzero()[:, 0]] = 1.0
    return transition
