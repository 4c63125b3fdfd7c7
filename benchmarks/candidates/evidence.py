"""The LM's next-token distribution as evidence about the HMM's state; no training."""

from torch import Tensor

from candidates.reference import LEAST, Beliefs, Dense, reconsidered


def heed(
    dense: Dense, beliefs: Beliefs, probabilities: Tensor, damping: float = 1.0, steps: int = 1
) -> Beliefs:
    """Move beliefs toward the prior whose next-token distribution is nearest to the LM's: (n, V).

    A step of EM for mixture weights: each state times the ratio of the LM's to the HMM's
    probability, averaged over what it emits. Where the two agree, nothing changes.
    """
    for _ in range(steps):
        ratio = probabilities / (beliefs.plain @ dense.emission).clamp_min(LEAST)
        factors = (ratio @ dense.emission.T).clamp_min(1e-6) ** damping
        beliefs = reconsidered(beliefs, factors)
    return beliefs
