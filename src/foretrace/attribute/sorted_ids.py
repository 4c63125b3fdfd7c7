"""Binary search in sorted ids."""

import torch
from torch import Tensor


def find_sorted(sorted_ids: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Find ids in a non-empty sorted tensor: (M,), (...) -> indices (...), whether found (...).

    The index of an id that is not found is valid but has no meaning.
    """
    # torch.searchsorted warns about tensors that are not contiguous: columns, transposed batches.
    wanted = ids.to(sorted_ids.dtype).contiguous()
    index = torch.searchsorted(sorted_ids.contiguous(), wanted).clamp_max_(len(sorted_ids) - 1)
    return index, sorted_ids[index] == ids
