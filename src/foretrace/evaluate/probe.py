"""A reference for fidelity: a linear probe on the LM's hidden states.

The HMM predicts from its belief whether the continuation violates the attribute. The probe predicts
the same from the LM's hidden state. Both predictions rank the first tokens of continuations.
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
    """Hidden states after first tokens, and whether a violation followed, for each prefix."""

    states: list[Floats] = field(default_factory=list)  # for each prefix: (tokens, size)
    violated: list[NDArray[np.bool_]] = field(default_factory=list)  # for each prefix: (tokens,)

    def add(self, states: Floats, violated: NDArray[np.bool_]) -> None:
        """Add the data of a prefix."""
        self.states.append(states)
        self.violated.append(violated)

    def expected(self) -> list[Floats]:
        """Predict the probability of no violation by cross-validation over prefixes."""
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        predictions = [np.full(len(prefix_states), 0.5) for prefix_states in self.states]
        for fold in range(FOLDS):
            train = [index for index in range(len(self.states)) if index % FOLDS != fold]
            labels = [violated for index in train for violated in self.violated[index]]
            if len(set(labels)) < 2:
                continue  # one class only: all predictions stay equal
            probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=1000))
            probe.fit(np.concatenate([self.states[index] for index in train]), labels)
            for index in range(fold, len(self.states), FOLDS):
                predictions[index] = probe.predict_proba(self.states[index])[:, 0]
        return predictions


@torch.inference_mode()
def states_after(lm: "PreTrainedModel", prefix: Sequence[int], tokens: Sequence[int]) -> Floats:
    """Compute the LM's last hidden state after the prefix and each token: (tokens, size)."""
    distinct = sorted(set(tokens))
    inputs = model_inputs(*pad_left([[*prefix, token] for token in distinct], 0), lm.device)
    hidden = lm(**inputs, output_hidden_states=True, logits_to_keep=1).hidden_states[-1][:, -1]
    states = dict(zip(distinct, hidden.double().cpu().numpy(), strict=True))
    return np.stack([states[token] for token in tokens])
