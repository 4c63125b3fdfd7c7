"""The two sides of an attribute's training data: texts that have it, and texts that do not."""

import os
from typing import NamedTuple

from foretrace.evaluate.preparation import to_score
from foretrace.evaluate.suite import AttributePlan

MOST_TEXTS = 5_000  # of a side


class Sides(NamedTuple):
    """Texts with an attribute and texts without it, the clearest first."""

    with_it: list[str]
    without: list[str]


def read_sides(plan: AttributePlan, data: str | os.PathLike[str], most: int = MOST_TEXTS) -> Sides:
    """Read both sides from the table that foretrace fits the attribute to."""
    scored = []
    for row in plan.rows(data):
        score = to_score(row[str(plan.score)], plan.equals)
        scored.append((1 - score if plan.invert else score, str(row[plan.text])))
    scored.sort(key=lambda pair: -pair[0])  # stable: equal scores keep the table's order
    return Sides(
        [text for score, text in scored if score > 0.5][:most],
        [text for score, text in reversed(scored) if score < 0.5][:most],
    )
