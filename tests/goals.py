"""Goals with strength 1 and the paper's transform, for tests of exactness."""

from foretrace.attribute import LogitAffine
from foretrace.lookahead import Lookahead
from foretrace.steering import Goal


def plain_goal(
    lookahead: Lookahead, scale: float = 1.0, shift: float = 0.0, neutral_end: bool = False
) -> Goal:
    """Return a goal of strength 1; end-of-text tokens are steered like others by default."""
    return Goal(lookahead, 1.0, transform=LogitAffine(scale, shift), neutral_end=neutral_end)
