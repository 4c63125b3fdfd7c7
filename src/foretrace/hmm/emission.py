"""Emission probabilities p(x | z): the operator interface and the dense implementation."""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretrace.errors import InvalidModelError
from foretrace.hmm.probability import (
    CHUNK_ELEMENTS,
    blocks_of,
    converted,
    distribution_totals,
    matmul,
    working_dtype,
)


@runtime_checkable
class Emission(Protocol):
    """Interface of emission probabilities p(x | z), token-major.

    Any object with these members can replace the dense table.

    Example:
        >>> from foretrace.hmm import DenseEmission, Emission
        >>> emission = DenseEmission(torch.tensor([[0.75, 0.0], [0.25, 1.0]]))
        >>> isinstance(emission, Emission)
        True
        >>> emission.of_tokens(torch.tensor([1]))
        tensor([[0.2500, 1.0000]])
        >>> emission.predict(torch.tensor([0.5, 0.5]))
        tensor([0.3750, 0.6250])
    """

    kind: ClassVar[str]
    """Name of this implementation in `config.json`."""

    @property
    def num_states(self) -> int:
        """Number of hidden states, h."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids, V."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the stored parameters."""

    def of_tokens(self, tokens: Tensor) -> Tensor:
        """Return p(x | z) of tokens for all states.

        Args:
            tokens: Token ids of any shape.

        Returns:
            Probabilities, (..., h).
        """

    def predict(self, belief: Tensor) -> Tensor:
        """Compute the probabilities of all tokens.

        Args:
            belief: State distributions, (..., h).

        Returns:
            p(x) = sum_z belief[z] p(x | z), (..., V).
        """

    def predict_blocks(self, beliefs: Tensor, size: int) -> Iterator[tuple[slice, Tensor]]:
        """Compute the same as `predict`, token-major, for a block of tokens at a time.

        Args:
            beliefs: State distributions as columns, (h, n).
            size: Tokens per block.

        Yields:
            A slice of token ids and their probabilities, (block, n). The next block may overwrite
            them.
        """

    def subset(self, tokens: Tensor) -> "EmissionSubset":
        """Return p(x | z) of some tokens as a matrix.

        Args:
            tokens: Token ids, (M,).
        """

    def expect(self, values: Tensor, tokens: Tensor) -> Tensor:
        """Compute the expectation of a function of the token that is 0 outside `tokens`.

        Args:
            values: Values of the tokens, (..., n).
            tokens: Token ids, (n,).

        Returns:
            Sum over `tokens` of values[x] p(x | z) for every state z, (..., h).
        """

    def sample(self, states: Tensor, generator: torch.Generator | None) -> Tensor:
        """Draw a token for each state.

        Args:
            states: State indices, (n,).
            generator: Source of random numbers; None for the global one.

        Returns:
            Token ids, (n,).
        """

    def tensors(self) -> dict[str, Tensor]:
        """Return the parameters by name, for saving."""

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Build the operator from the parameters that `tensors` returned."""

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> Self:
        """Return a copy on another device or with another dtype."""


class EmissionSubset(NamedTuple):
    """p(x | z) of some tokens: a dense or CSR matrix plus a rank-one background."""

    matrix: Tensor  # (M, h)
    background: Tensor  # (M,)
    leak: Tensor  # (h,)
    bounds: NDArray[np.int32] | None = None  # (M + 1,): offsets of a CSR matrix, on the host

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix in memory; column indices are as large as float32 values."""
        if self.matrix.is_sparse_csr:
            return 2 * self.matrix.values().nbytes
        return self.matrix.nbytes

    def block(self, block: slice) -> "EmissionSubset":
        """Return the same for a slice of the tokens."""
        if block.start == 0 and block.stop == len(self.background):
            return self
        if self.bounds is None:
            return EmissionSubset(self.matrix[block], self.background[block], self.leak)
        first, last = int(self.bounds[block.start]), int(self.bounds[block.stop])
        matrix = csr_rows(self.matrix, block, slice(first, last))
        bounds = self.bounds[block.start : block.stop + 1] - first
        return EmissionSubset(matrix, self.background[block], self.leak, bounds)

    def predict(self, beliefs: Tensor) -> Tensor:
        """Compute p(x) of the tokens, for beliefs as columns: (h, n) -> (M, n)."""
        columns = beliefs.to(self.matrix.dtype)
        entries, leaked = self.matrix @ columns, self.leak @ columns
        return entries.addcmul_(self.background[:, None], leaked).to(beliefs.dtype)


@dataclass(frozen=True, eq=False)
class DenseEmission:
    """Emission probabilities as a (V, h) table: `table[x, z]`. Columns sum to 1.

    The table is token-major because filtering reads the row of one token. The row is then
    contiguous.
    """

    kind: ClassVar[str] = "dense"
    table: Tensor
    _normaliser: Tensor = field(init=False, repr=False)  # (h,): 1 / sum of each column

    def __post_init__(self) -> None:
        totals = distribution_totals("emission", self.table, dim=0)
        normaliser = totals.reciprocal().to(working_dtype(self.table.dtype))
        object.__setattr__(self, "_normaliser", normaliser)

    @property
    def num_states(self) -> int:
        """Number of hidden states, h."""
        return self.table.shape[1]

    @property
    def vocab_size(self) -> int:
        """Number of token ids, V."""
        return self.table.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the stored table."""
        return self.table.dtype

    def of_tokens(self, tokens: Tensor) -> Tensor:
        """Return p(x | z) of tokens for all states: (...) ids -> (..., h)."""
        return self.table[tokens] * self._normaliser

    def predict(self, belief: Tensor) -> Tensor:
        """Compute p(x) = sum_z belief[z] emission[x, z] for all tokens: (..., h) -> (..., V)."""
        return matmul(belief * self._normaliser, self.table.T)

    def predict_blocks(self, beliefs: Tensor, size: int) -> Iterator[tuple[slice, Tensor]]:
        """Compute p(x) for beliefs as columns, in blocks of tokens: (h, n) -> (block, n)."""
        rows = (beliefs * self._normaliser[:, None]).T
        for block in blocks_of(self.vocab_size, size):
            yield block, matmul(rows, self.table[block].T).T

    def subset(self, tokens: Tensor) -> EmissionSubset:
        """Return p(x | z) of some tokens as a matrix: (M,) ids."""
        rows = self.of_tokens(tokens)
        return EmissionSubset(rows, rows.new_zeros(len(rows)), rows.new_zeros(self.num_states))

    def expect(self, values: Tensor, tokens: Tensor) -> Tensor:
        """Compute the sum over `tokens` of values[x] emission[x, z]: (..., n), (n,) -> (..., h)."""
        expected = values.new_zeros(*values.shape[:-1], self.num_states)
        step = max(1, CHUNK_ELEMENTS // self.num_states)
        for block in blocks_of(len(tokens), step):
            expected += matmul(values[..., block], self.table[tokens[block]])
        return expected * self._normaliser

    def sample(self, states: Tensor, generator: torch.Generator | None) -> Tensor:
        """Draw a token for each state by inverting its cumulative distribution: (n,) -> (n,)."""
        uniform = uniforms(states, generator)
        tokens = torch.empty_like(states)
        distinct, distinct_index = torch.unique(states, return_inverse=True)
        width = max(1, CHUNK_ELEMENTS // self.vocab_size)  # states per chunk
        for first in range(0, len(distinct), width):
            chunk = distinct[first : first + width]
            cumulative = self.table[:, chunk].T.to(torch.float64).cumsum(-1)  # (chunk, V)
            cumulative = cumulative / cumulative[:, -1:]  # not in place: it divides by itself
            in_chunk = (distinct_index >= first) & (distinct_index < first + width)
            row = distinct_index[in_chunk] - first
            # One ascending sequence for all states of the chunk: row i runs from i to i + 1.
            ascending = cumulative + torch.arange(len(chunk), device=states.device)[:, None]
            index = torch.searchsorted(ascending.flatten(), uniform[in_chunk] + row, right=True)
            tokens[in_chunk] = index - row * self.vocab_size
        return tokens

    def tensors(self) -> dict[str, Tensor]:
        """Return the parameters by name, for saving."""
        return {"table": self.table}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Build the operator from the parameters that `tensors` returned."""
        return cls(tensors["table"])

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> Self:
        """Return a copy; raise if all probabilities of a token underflow in float16."""
        table = converted(self.table, self._normaliser, device, dtype)
        if dtype == torch.float16:
            vanished = (table.amax(1) == 0) & (self.table.amax(1) > 0).to(table.device)
            if bool(vanished.any()):
                raise InvalidModelError(
                    f"{int(vanished.sum())} tokens have no probability above 6e-8 in any state, "
                    f"and would become impossible in float16. Use bfloat16."
                )
        return type(self)(table)


def csr_rows(matrix: Tensor, block: slice, entries: slice) -> Tensor:
    """Return a slice of the rows of a CSR matrix; `entries` is the range of their entries."""
    offsets = matrix.crow_indices()[block.start : block.stop + 1]
    columns, values = matrix.col_indices()[entries], matrix.values()[entries]
    return csr(offsets - offsets[0], columns, values, (len(offsets) - 1, matrix.shape[1]))


def csr(offsets: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """Build a CSR matrix without checking it, and without torch's warning about beta support."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta", UserWarning)
        return torch.sparse_csr_tensor(offsets, columns, values, shape, check_invariants=False)


def uniforms(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw float64 numbers in [0, 1 - 2**-36], so that adding an integer does not round up."""
    drawn = torch.rand(like.shape, dtype=torch.float64, device=like.device, generator=generator)
    return drawn * (1 - 2.0**-36)
