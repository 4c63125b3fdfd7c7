"""The transform of probabilities that sharpens, softens or shifts them."""

from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from foretrace.errors import InvalidInputError


@dataclass(frozen=True)
class LogitAffine:
    """sigma(scale * logit(p) + shift): eq. (transform), with b = scale and c = shift.

    The paper's released code computes sigma(b * (logit(p) - c)): its b = 10, c = 3 is scale = 10,
    shift = -30 here.
    """

    scale: float = 1.0
    shift: float = 0.0

    def __post_init__(self) -> None:
        if not (isfinite(self.scale) and isfinite(self.shift) and self.scale > 0):
            raise InvalidInputError(
                f"A transform needs a scale above 0 and a finite shift, but has {self.scale} and "
                f"{self.shift}."
            )

    @property
    def identity(self) -> bool:
        """Whether it changes nothing."""
        return self.scale == 1.0 and self.shift == 0.0

    def __call__(self, probability: Tensor) -> Tensor:
        """Transform probabilities; 0 stays 0 and 1 stays 1."""
        return torch.sigmoid(self.scale * torch.logit(probability) + self.shift)


def log_common(log_size: Tensor, scale: Tensor | float, shift: Tensor | float) -> Tensor:
    """Give what `log_transformed` finds common to all shares of a size."""
    return (log_size * scale + shift).clamp_max_(0.0)


def log_transformed(
    share: Tensor, log_size: Tensor, scale: Tensor | float, shift: Tensor | float
) -> tuple[Tensor, Tensor]:
    """Give log of the transform of share * exp(log_size): what differs, and what is common.

    (..., n) shares, whose memory is used; (n,) sizes, scales and shifts -> (..., n) and (n,), which
    add up to it. They are apart because the common part may be so large that the other would be
    lost in the sum. log sigma(x) is min(x, 0) + log sigma(|x|), which on CPUs is also several times
    as fast as what torch has.
    """
    rest = torch.addcmul(share.new_ones(()), share, -log_size.exp()).clamp_min_(0.0)  # 1 - p
    logit = share.log_().sub_(rest.log_()).mul_(scale)
    offset = log_size * scale + shift
    tail = torch.add(logit, offset, out=rest).abs_().sigmoid_().log_()
    positive, common = offset.clamp_min(0.0), log_common(log_size, scale, shift)
    return logit.add_(positive).minimum(-common).add_(tail), common
