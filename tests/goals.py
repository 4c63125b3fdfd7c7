"""Compiled goals for tests, and steered logits of rows."""

from collections.abc import Sequence

from torch import Tensor

from foretrace.attribute import Attribute, LogitAffine
from foretrace.engines.prefix_tracker import PrefixTracker
from foretrace.hmm import HMM
from foretrace.steering import CompiledGoal, Compiler, Goal, Marker, Request


def compiled(
    hmm: HMM,
    attribute: Attribute,
    horizon: int,
    strength: float | None = 1.0,
    *,
    neutral_end: bool = True,
    after: Marker | None = None,
    window: int | Marker | None = None,
) -> CompiledGoal:
    """Compile one goal, with required text where the HMM expects it."""
    goal = Goal(attribute, strength, neutral_end=neutral_end, after=after, window=window)
    return Compiler(hmm, horizon, exact=True).compile(goal)


def plain_goal(
    hmm: HMM,
    attribute: Attribute,
    horizon: int,
    scale: float = 1.0,
    shift: float = 0.0,
    neutral_end: bool = False,
) -> CompiledGoal:
    """Compile a goal of strength 1; end-of-text tokens are steered like others by default."""
    transform = LogitAffine(scale, shift)
    goal = Goal(attribute, 1.0, transform=transform, neutral_end=neutral_end)
    return Compiler(hmm, horizon).compile(goal)


def reweighted(tracker: PrefixTracker, logits: Tensor) -> Tensor:
    """Return the steered logits of the rows of the tracker's last step."""
    steered = logits.clone()
    tracker.reweight_(steered)
    return steered


def steer(
    hmm: HMM, requests: Sequence[Request], texts: Sequence[Sequence[int]], logits: Tensor
) -> Tensor:
    """Return the logits of rows after texts, steered in one batch."""
    tracker = PrefixTracker(hmm)
    tracker.step(requests, texts)
    return reweighted(tracker, logits)
