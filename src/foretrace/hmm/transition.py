"""How the hidden state moves: an operator with two products, and its dense form."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from foretrace.errors import InvalidModelError
from foretrace.hmm.probability import converted, distribution_totals, matmul, working_dtype


@runtime_checkable
class Transition(Protocol):
    """p(z' | z) as an operator. Whoever has these can stand in for a dense matrix."""

    kind: ClassVar[str]
    """Name of this form in `config.json`."""

    @property
    def num_states(self) -> int:
        """h, the number of hidden states."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype that the parameters are stored in."""

    def predict(self, belief: Tensor) -> Tensor:
        """Carry distributions over states one step forward: (..., h) -> (..., h)."""

    def expect(self, values: Tensor) -> Tensor:
        """Give the expectation of a function of the next state: (..., h) -> (..., h)."""

    def tensors(self) -> dict[str, Tensor]:
        """Give the parameters by name, to be saved."""

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Build it from what `tensors` gave."""

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> Self:
        """Move or convert it."""


@dataclass(frozen=True, eq=False)
class DenseTransition:
    """p(z' | z) as an (h, h) matrix: `matrix[z, z']`, rows sum to 1."""

    kind: ClassVar[str] = "dense"
    matrix: Tensor
    _normaliser: Tensor = field(init=False, repr=False)  # (h,): 1 / what each row sums to

    def __post_init__(self) -> None:
        totals = distribution_totals("transition", self.matrix, dim=1)
        rows, columns = self.matrix.shape
        if rows != columns:
            raise InvalidModelError(
                f"transition has shape ({rows}, {columns}), but goes from states to states: "
                f"it must be square."
            )
        normaliser = totals.reciprocal().to(working_dtype(self.matrix.dtype))
        object.__setattr__(self, "_normaliser", normaliser)

    @property
    def num_states(self) -> int:
        """h, the number of hidden states."""
        return self.matrix.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype that the matrix is stored in."""
        return self.matrix.dtype

    def predict(self, belief: Tensor) -> Tensor:
        """Give p(z' | past) = sum_z belief[z] transition[z, z']: (..., h) -> (..., h)."""
        return matmul(belief * self._normaliser, self.matrix)

    def expect(self, values: Tensor) -> Tensor:
        """Give E[values(z') | z] = sum_z' transition[z, z'] values[z']: (..., h) -> (..., h)."""
        return matmul(values, self.matrix.T) * self._normaliser

    def tensors(self) -> dict[str, Tensor]:
        """Give the parameters by name, to be saved."""
        return {"matrix": self.matrix}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Build it from what `tensors` gave."""
        return cls(tensors["matrix"])

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> Self:
        """Move or convert the matrix."""
        return type(self)(converted(self.matrix, self._normaliser[:, None], device, dtype))
