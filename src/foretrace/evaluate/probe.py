"""A yardstick of fidelity: a linear probe on the LM's own state, asked what the HMM is asked.

The probe sees what the LM knows after a token; the HMM sees its belief. Both rank first tokens by
what comes after them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from foretrace.engines.transformers.padding import model_inputs, pad_left

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FOLDS = 5
Floats = NDArray[np.float64]


@dataclass
class Probe:
    """States after first tokens, and what came after them, prefix by prefix."""

    states: list[Floats] = field(default_factory=list)  # of each prefix: (tokens, size)
    violated: list[NDArray[np.bool_]] = field(default_factory=list)  # of each prefix: (tokens,)

    def add(self, states: Floats, violated: NDArray[np.bool_]) -> None:
        """Note one prefix."""
        self.states.append(states)
        self.violated.append(violated)

    def expected(self) -> list[Floats]:
        """Give the probability that nothing violates, by a probe that has not seen the prefix."""
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        found = [np.full(len(own), 0.5) for own in self.states]
        for fold in range(FOLDS):
            known = [place for place in range(len(self.states)) if place % FOLDS != fold]
            labels = [violated for place in known for violated in self.violated[place]]
            if len(set(labels)) < 2:
                continue  # nothing to tell apart: all expectations are equal
            probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=1000))
            probe.fit(np.concatenate([self.states[place] for place in known]), labels)
            for place in range(fold, len(self.states), FOLDS):
                found[place] = probe.predict_proba(self.states[place])[:, 0]
        return found


@torch.inference_mode()
def states_after(lm: "PreTrainedModel", prefix: Sequence[int], tokens: Sequence[int]) -> Floats:
    """Read the LM's last hidden state after the prefix and each token: (tokens, size)."""
    distinct = sorted(set(tokens))
    given = model_inputs(*pad_left([[*prefix, token] for token in distinct], 0), lm.device)
    hidden = lm(**given, output_hidden_states=True, logits_to_keep=1).hidden_states[-1][:, -1]
    rows = dict(zip(distinct, hidden.double().cpu().numpy(), strict=True))
    return np.stack([rows[token] for token in tokens])
