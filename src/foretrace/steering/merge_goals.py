"""Merge several goals into one product, so that they share one lookahead table."""

from collections.abc import Sequence
from functools import reduce
from operator import and_
from weakref import WeakKeyDictionary, ref

from foretrace.lookahead.lookahead import Lookahead
from foretrace.steering.goal import Goal, common_window

# Merged lookaheads by the first lookahead, and by the others. They are dropped with the first.
_MERGED: WeakKeyDictionary[Lookahead, dict[tuple[ref[Lookahead], ...], Lookahead]]
_MERGED = WeakKeyDictionary()


def merge_goals(goals: Sequence[Goal]) -> tuple[Goal, ...]:
    """Merge the goals that have no transform into one goal of the product of their attributes.

    The result looks ahead as far as the goal with the largest horizon, and ends are neutral if they
    are for one of the goals. Its tables are built once for each combination of lookaheads.

    Args:
        goals: The goals of one sequence.

    Returns:
        The merged goal, followed by the goals with a transform. Their factors multiply.

    Raises:
        InvalidInputError: If the product cannot be steered toward, such as that of evidence and of
            a sum of products, if it has too many terms, or if the goals have different windows.

    Example:
        >>> from foretrace.steering.merge_goals import merge_goals
        >>> lookahead = ft.Lookahead(hmm, attribute, horizon=8)
        >>> (goal,) = merge_goals([ft.Goal(lookahead, 2.0), ft.Goal(lookahead, 3.0)])
        >>> goal.lookahead.attribute.name
        '(nontoxic ** 2 & nontoxic ** 3)'
    """
    plain = [goal for goal in goals if goal.transform.is_identity]
    if len(plain) < 2:
        return tuple(goals)
    window = common_window(goals)
    lookahead = _merged([goal.lookahead for goal in plain])
    neutral_end = any(goal.neutral_end for goal in plain)
    others = (goal for goal in goals if not goal.transform.is_identity)
    merged = Goal(lookahead, 1.0, neutral_end=neutral_end, after=window.after, window=window.until)
    return (merged, *others)


def _merged(lookaheads: Sequence[Lookahead]) -> Lookahead:
    """Return the lookahead of the product of attributes, from the cache if it is there."""
    first, *others = lookaheads
    key, merged = tuple(map(ref, others)), _MERGED.setdefault(first, {})
    if key not in merged:
        attribute = reduce(and_, (lookahead.attribute for lookahead in lookaheads))
        horizon = max(lookahead.horizon for lookahead in lookaheads)
        merged[key] = Lookahead(first.hmm, attribute, horizon)
    return merged[key]
