"""The markers of a batch's rows."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from foretrace.steering.marker_pool import MarkerPool
from foretrace.steering.transfer import Transfer
from foretrace.steering.window import Marker, Window


class MarkerPlan(NamedTuple):
    """Where the automata of markers are, and the lengths of windows: (n,) int64 each.

    The first four are about the marker at which a window begins, the next four about that at which
    it ends. `found` is -1 if there is no such marker, and `length` if there is no such length.
    """

    begin_classes: Tensor
    begin_transitions: Tensor
    begin_num_classes: Tensor
    begin_found: Tensor
    end_classes: Tensor
    end_transitions: Tensor
    end_num_classes: Tensor
    end_found: Tensor
    length: Tensor


def plan_markers(
    windows: Sequence[Window], pool: MarkerPool, transfer: Transfer
) -> MarkerPlan | None:
    """Return the plan of the rows' markers; None if no row has one."""
    if not any(window.has_marker for window in windows):
        return None
    numbers = [
        (
            *pool.add(window.after),
            *pool.add(window.until if isinstance(window.until, Marker) else None),
            -1 if window.length is None else window.length,
        )
        for window in windows
    ]
    return MarkerPlan(*transfer.integers(numbers, len(MarkerPlan._fields)))
