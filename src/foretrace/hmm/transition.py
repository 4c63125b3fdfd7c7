"""Transition probabilities p(z' | z): the operator interface and the dense implementation."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from foretrace.errors import InvalidModelError
from foretrace.hmm.probability import converted, distribution_totals, matmul, working_dtype


@runtime_checkable
class Transition(Protocol):
    """Interface of transition probabilities p(z' | z).

    Any object with these members can replace the dense matrix, for example one with structure.

    Example:
        >>> from foretrace.hmm import DenseTransition, Transition
        >>> transition = DenseTransition(torch.tensor([[0.9, 0.1], [0.2, 0.8]]))
        >>> isinstance(transition, Transition)
        True
        >>> transition.predict(torch.tensor([1.0, 0.0]))
        tensor([0.9000, 0.1000])
        >>> transition.expect(torch.tensor([1.0, 0.0]))
        tensor([0.9000, 0.2000])
    """

    kind: ClassVar[str]
    """Name of this implementation in `config.json`."""

    @property
    def num_states(self) -> int:
        """Number of hidden states, h."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the stored parameters."""

    def predict(self, belief: Tensor) -> Tensor:
        """Compute the state distribution one step later.

        Args:
            belief: State distributions p(z), (..., h).

        Returns:
            p(z') = sum_z belief[z] p(z' | z), (..., h).
        """

    def expect(self, values: Tensor) -> Tensor:
        """Compute the expectation of a function of the next state, given the current state.

        Args:
            values: Values for every next state, (..., h).

        Returns:
            E[values(z') | z] for every state z, (..., h).
        """

    def tensors(self) -> dict[str, Tensor]:
        """Return the parameters by name, for saving."""

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Build the operator from the parameters that `tensors` returned."""

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> Self:
        """Return a copy on another device or with another dtype."""


@dataclass(frozen=True, eq=False)
class DenseTransition:
    """Transition probabilities as an (h, h) matrix: `matrix[z, z']`. Rows sum to 1."""

    kind: ClassVar[str] = "dense"
    matrix: Tensor
    _normaliser: Tensor = field(init=False, repr=False)  # (h,): 1 / sum of each row

    def __post_init__(self) -> None:
        totals = distribution_totals("transition", self.matrix, dim=1)
        rows, columns = self.matrix.shape
        if rows != columns:
            raise InvalidModelError(
                f"transition has shape ({rows}, {columns}), but must be square: (states, states)."
            )
        normaliser = totals.reciprocal().to(working_dtype(self.matrix.dtype))
        object.__setattr__(self, "_normaliser", normaliser)

    @property
    def num_states(self) -> int:
        """Number of hidden states, h."""
        return self.matrix.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the stored matrix."""
        return self.matrix.dtype

    def predict(self, belief: Tensor) -> Tensor:
        """Compute p(z') = sum_z belief[z] transition[z, z']: (..., h) -> (..., h)."""
        return matmul(belief * self._normaliser, self.matrix)

    def expect(self, values: Tensor) -> Tensor:
        """Compute sum_z' transition[z, z'] values[z']: (..., h) -> (..., h)."""
        return matmul(values, self.matrix.T) * self._normaliser

    def tensors(self) -> dict[str, Tensor]:
        """Return the parameters by name, for saving."""
        return {"matrix": self.matrix}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Build the operator from the parameters that `tensors` returned."""
        return cls(tensors["matrix"])

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> Self:
        """Return a copy on another device or with another dtype."""
        return type(self)(converted(self.matrix, self._normaliser[:, None], device, dtype))
