"""Copies of small lists to a device."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def to_device(values: Sequence[Any], device: torch.device) -> Tensor:
    """Copy numbers to a device without waiting for it, as `torch.tensor(..., device=...)` does."""
    return torch.tensor(values).to(device, non_blocking=True)
