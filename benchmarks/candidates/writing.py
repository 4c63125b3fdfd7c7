"""Texts steered by a candidate: the sampler of the evaluation, with the reference in its place."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from candidates.reference import Beliefs, Reference
from foretrace.engines.transformers import Goals
from foretrace.engines.transformers.sampler import Sampler
from foretrace.hmm import HMM
from foretrace.steering import BatchSteering, Request
from foretrace.steering.neutral_end import NeutralEnd

Look = Callable[[Beliefs, Tensor], Beliefs]
"""What the LM's logits, (n, V), change in what is believed."""


def believed(hmm: HMM, prompts: Sequence[Sequence[int]]) -> Tensor:
    """Give the HMM's belief of the next state after prompts: (n, h)."""
    requests = [Request((), tuple(prompt), 1) for prompt in prompts]
    rows = BatchSteering(hmm).read_generated(requests, [[]] * len(requests))
    return torch.stack([row.predicted for row in rows])


@dataclass(frozen=True)
class CandidateSampler(Sampler):
    """Draws from a language model that a candidate steers; ends of texts are left neutral."""

    hmm: HMM | None = None
    reference: Reference | None = None
    look: Look = lambda beliefs, logits: beliefs
    strength: float = 1.0
    shift: float = 0.0

    def processor(
        self, goals: Goals, prompts: Sequence[Sequence[int]], mask: Tensor
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """Give what steers by the reference."""
        assert self.hmm is not None
        reference, start = self.reference, mask.shape[1]
        assert reference is not None
        predicted = believed(self.hmm, prompts)
        beliefs: Beliefs | None = None

        def steer(ids: Tensor, logits: Tensor) -> Tensor:
            nonlocal beliefs
            if beliefs is None:
                copies = len(logits) // len(predicted)
                beliefs = Beliefs.before(predicted.repeat_interleave(copies, 0))
            else:
                beliefs = reference.advance(beliefs, ids[:, -1])
            left = self.max_new_tokens - (ids.shape[1] - start) - 1
            log_eap = reference.log_eap(self.look(beliefs, logits), left)
            logit = log_eap - torch.log(-torch.expm1(log_eap))
            ends = NeutralEnd(logits, range(len(logits)), [list(self.ends)] * len(logits))
            steered = logits + torch.nn.functional.logsigmoid(self.strength * logit + self.shift)
            ends.restore_(steered, ends.forbidden(steered))
            return steered

        return steer
