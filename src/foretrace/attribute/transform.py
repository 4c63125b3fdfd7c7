"""Affine transforms of probabilities in logit space."""

from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from foretrace.errors import InvalidInputError


@dataclass(frozen=True)
class LogitAffine:
    """The transform sigma(scale * logit(p) + shift): eq. (transform), b = scale and c = shift.

    The paper's released code computes sigma(b * (logit(p) - c)): its b = 10, c = 3 is scale = 10,
    shift = -30 here.

    Attributes:
        scale: The factor of the logit. More than 1 sharpens probabilities, less softens them.
        shift: The offset of the scaled logit. A negative shift lowers probabilities.

    Raises:
        InvalidInputError: If the scale is not positive, or a value is not finite.

    Example:
        >>> import foretrace as ft
        >>> ft.LogitAffine(scale=2.0)(torch.tensor([0.25, 0.5, 1.0]))
        tensor([0.1000, 0.5000, 1.0000])
    """

    scale: float = 1.0
    shift: float = 0.0

    def __post_init__(self) -> None:
        if not (isfinite(self.scale) and isfinite(self.shift) and self.scale > 0):
            raise InvalidInputError(
                f"A transform needs a finite scale above 0 and a finite shift, not {self.scale} "
                f"and {self.shift}."
            )

    @property
    def is_identity(self) -> bool:
        """Return whether the transform leaves every probability unchanged."""
        return self.scale == 1.0 and self.shift == 0.0

    def __call__(self, probability: Tensor) -> Tensor:
        """Transform probabilities; 0 stays 0 and 1 stays 1.

        Args:
            probability: Probabilities in [0, 1], of any shape.

        Returns:
            The transformed probabilities, of the same shape and type.
        """
        return torch.sigmoid(self.scale * torch.logit(probability) + self.shift)


def log_common(log_size: Tensor, scale: Tensor | float, shift: Tensor | float) -> Tensor:
    """Return the second result of `log_transformed`, which does not depend on the shares."""
    return (log_size * scale + shift).clamp_max_(0.0)


def log_transformed(
    log_share: Tensor, log_size: Tensor, scale: Tensor | float, shift: Tensor | float
) -> tuple[Tensor, Tensor]:
    """Compute the log of the transform of exp(log_share + log_size), as two summands.

    The first summand (..., n) differs between shares, the second (n,) is common to all of them. It
    may be so large that the first would be lost in their sum. `log_share` (..., n) is overwritten;
    sizes, scales and shifts are (n,). log sigma(x) is computed as min(x, 0) + log sigma(|x|), which
    on CPUs is several times as fast as torch's function.
    """
    rest = torch.add(log_share, log_size).expm1_().neg_().clamp_min_(0.0)  # 1 - p
    logit = log_share.sub_(rest.log_()).mul_(scale)
    offset = log_size * scale + shift
    tail = torch.add(logit, offset, out=rest).abs_().sigmoid_().log_()
    positive, common = offset.clamp_min(0.0), log_common(log_size, scale, shift)
    return logit.add_(positive).minimum(-common).add_(tail), common
