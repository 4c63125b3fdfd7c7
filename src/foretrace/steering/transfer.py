"""Copy small lists to a device without waiting for it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def to_device(values: Sequence[Any], device: torch.device) -> Tensor:
    """Copy numbers to a device. Unlike `torch.tensor(..., device=...)`, do not wait for it."""
    return torch.tensor(values).to(device, non_blocking=True)
