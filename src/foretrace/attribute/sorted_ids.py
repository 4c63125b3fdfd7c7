"""Finding ids among others that rise."""

import torch
from torch import Tensor


def lookup(rising: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Find where ids stand among others, one at least: places, and whether it is really there.

    (M,), (...) -> (...), (...). Where it is not, the place is one that can be looked at.
    """
    place = torch.searchsorted(rising, ids.to(rising.dtype)).clamp_max_(len(rising) - 1)
    return place, rising[place] == ids
