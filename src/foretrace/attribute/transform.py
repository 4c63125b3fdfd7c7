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

    def of_log(self, log_probability: Tensor) -> Tensor:
        """Transform probabilities that are given, and wanted, as logarithms: without underflow."""
        if self.identity:
            return log_probability
        return logit_affine_of_log(log_probability, self.scale, self.shift)


def logit_affine_of_log(
    log_probability: Tensor, scale: Tensor | float, shift: Tensor | float
) -> Tensor:
    """Transform probabilities given as logarithms, each row by its own scale and shift."""
    log_rest = torch.expm1(log_probability).neg_().log_()  # log(1 - p)
    logit = torch.sub(log_probability, log_rest, out=log_rest)
    return torch.nn.functional.logsigmoid(logit.mul_(scale).add_(shift))
