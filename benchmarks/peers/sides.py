"""The two sides of an attribute's training data: texts that have it, and texts that do not."""

import os
import random
from typing import NamedTuple

from foretrace.evaluate.preparation import to_score
from foretrace.evaluate.suite import AttributePlan

MOST_TEXTS = 5_000  # of a side


class Sides(NamedTuple):
    """Texts with an attribute and texts without it, in random order."""

    with_it: list[str]
    without: list[str]


def read_sides(plan: AttributePlan, data: str | os.PathLike[str], most: int = MOST_TEXTS) -> Sides:
    """Draw both sides from the table that foretrace fits the attribute to.

    The clearest texts of a table, or its ends, may differ in source and date more than in the
    attribute.
    """
    with_it: list[str] = []
    without: list[str] = []
    for row in plan.rows(data):
        score = to_score(row[str(plan.score)], plan.equals)
        if score != 0.5:
            (with_it if (score > 0.5) != plan.invert else without).append(str(row[plan.text]))
    shuffle = random.Random(0).shuffle
    shuffle(with_it)
    shuffle(without)
    return Sides(with_it[:most], without[:most])
