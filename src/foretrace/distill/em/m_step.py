"""The M-step: expected counts that fade as new ones come in, and the probabilities they make.

Mini-batch EM keeps counts = (1 - step) * counts + step * new. Of the emission, V x h numbers, only
the rows of tokens in the batch change; all others shrink by a common factor. That factor is kept
aside, so that a step costs what its batch costs, whatever the vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from foretrace.distill.em.e_step import BatchCounts, BatchParameters
from foretrace.distill.em.workspace import Workspace
from foretrace.hmm import HMM, HMMConfig
from foretrace.hmm.probability import CHUNK_ELEMENTS

SMALLEST_FACTOR = 1e-15  # below this the factor is multiplied in: about once in 35 steps


@dataclass
class Counts:
    """Expected counts per sequence, and the pseudocount that keeps the unseen possible.

    With an `eos_token_id`, the last state is absorbing and alone emits it: both are exact, not
    learnt.
    """

    initial: Tensor  # (h,)
    transition: Tensor  # (h, h)
    emission: Tensor  # (V, h): to be multiplied by `factor`
    total: Tensor  # (h,): what the emission of each state sums to, with the factor
    pseudocount: float
    eos_token_id: int | None
    factor: float = 1.0

    def __post_init__(self) -> None:
        self._workspace = Workspace(self.emission)

    @classmethod
    def from_hmm(
        cls, hmm: HMM, length: int, *, pseudocount: float, eos_token_id: int | None
    ) -> Self:
        """Start from an HMM: as if every state had been visited equally often."""
        states, vocab = hmm.num_states, hmm.vocab_size
        visits = length / states
        identity = torch.eye(states, dtype=hmm.initial.dtype, device=hmm.device)
        emission = torch.empty(vocab, states, dtype=hmm.initial.dtype, device=hmm.device)
        step = max(1, CHUNK_ELEMENTS // states)
        for tokens in torch.split(torch.arange(vocab, device=hmm.device), step):
            emission[tokens] = hmm.emission.rows(tokens) * visits
        return cls(
            initial=hmm.initial.clone(),
            transition=hmm.transition.predict(identity) * visits,
            emission=emission,
            total=torch.full_like(hmm.initial, visits),
            pseudocount=pseudocount,
            eos_token_id=eos_token_id,
        )

    @property
    def spoken(self) -> int:
        """How many tokens the states that are not end of text can emit."""
        return len(self.emission) - (self.eos_token_id is not None)

    def parameters(self, tokens: Tensor) -> BatchParameters:
        """Turn counts into probabilities, for the (U,) tokens of a batch alone.

        The rows stand where those of the call before stood.
        """
        rows = self._workspace.room("rows", len(tokens), len(self.total))
        torch.index_select(self.emission, 0, tokens, out=rows)
        share = _positive(self.total + self.spoken * self.pseudocount).reciprocal()
        torch.addcmul(self.pseudocount * share, rows, self.factor * share, out=rows)
        transition = self.transition + self.pseudocount
        if self.eos_token_id is not None:
            rows[:, -1] = 0.0
            rows[tokens == self.eos_token_id] = _last(rows[0])
            transition[-1] = _last(transition[-1])
        transition /= _positive(transition.sum(-1, keepdim=True))
        initial = self.initial + self.pseudocount
        return BatchParameters(initial / initial.sum(), transition, rows)

    def update(self, tokens: Tensor, new: BatchCounts, step: float) -> None:
        """Fade the counts by 1 - step, and add the batch's, per sequence, times step."""
        sequences = float(new.summary[1])
        if sequences == 0:  # all impossible: nothing to learn
            return
        share = step / sequences
        self._fade(1 - step)
        self.initial.mul_(1 - step).add_(new.initial, alpha=share)
        self.transition.mul_(1 - step).add_(new.transition, alpha=share)
        self.total.mul_(1 - step).add_(new.rows.sum(0), alpha=share)
        self.emission.index_add_(0, tokens, new.rows, alpha=share / self.factor)

    def _fade(self, by: float) -> None:
        self.factor *= by
        if self.factor < SMALLEST_FACTOR:
            self.emission.mul_(self.factor)
            self.factor = 1.0

    def to_hmm(self, config: HMMConfig) -> HMM:
        """Make the HMM. The emission table is turned over, not copied: the counts are spent."""
        few = self.parameters(torch.zeros(1, dtype=torch.long, device=self.emission.device))
        table = self.emission.mul_(self.factor).add_(self.pseudocount)
        if self.eos_token_id is not None:
            table[self.eos_token_id] = 0.0
            table[:, -1] = 0.0
            table[self.eos_token_id, -1] = 1.0
        # A state that nothing has visited, without a pseudocount, may say anything.
        totals = table.sum(0)
        table[:, totals == 0] = 1 / len(table)
        table.div_(table.sum(0))
        return HMM(few.initial, _stochastic(few.transition), table, config)

    def tensors(self) -> dict[str, Tensor]:
        """Give the state by name, for a checkpoint."""
        return {
            "initial": self.initial,
            "transition": self.transition,
            "emission": self.emission,
            "total": self.total,
            "factor": self.total.new_tensor(self.factor, dtype=torch.float64),
        }

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over the state of a checkpoint."""
        for name in ("initial", "transition", "emission", "total"):
            getattr(self, name).copy_(tensors[name])
        self.factor = float(tensors["factor"])


def _positive(totals: Tensor) -> Tensor:
    """Keep totals off 0, so that what was never visited becomes 0 and not NaN."""
    return totals.clamp_min(torch.finfo(totals.dtype).tiny)


def _last(like: Tensor) -> Tensor:
    """Give the distribution that is all in the last state: (..., h)."""
    one = torch.zeros_like(like)
    one[..., -1] = 1.0
    return one


def _stochastic(transition: Tensor) -> Tensor:
    """Let states that were never left stay where they are."""
    empty = transition.sum(-1) == 0
    transition[empty, empty.nonzero()[:, 0]] = 1.0
    return transition
