"""What the hidden state says: an operator from states to tokens, and its dense form."""

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
    """p(x | z) as an operator, token-major. Whoever has these can stand in for a dense table."""

    kind: ClassVar[str]
    """Name of this form in `config.json`."""

    @property
    def num_states(self) -> int:
        """h, the number of hidden states."""

    @property
    def vocab_size(self) -> int:
        """V, the number of tokens."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype that the parameters are stored in."""

    def rows(self, tokens: Tensor) -> Tensor:
        """Give p(x | z) of each token for all states: (...) ids -> (..., h)."""

    def predict(self, belief: Tensor) -> Tensor:
        """Give sum_z belief[z] p(x | z) for the whole vocabulary: (..., h) -> (..., V)."""

    def predict_blocks(self, beliefs: Tensor, size: int) -> Iterator[tuple[slice, Tensor]]:
        """Give the same token-major, of beliefs as columns, `size` tokens at a time.

        (h, n) -> blocks of tokens, each with its (block, n); it is overwritten by the next one.
        """

    def part(self, tokens: Tensor) -> "Part":
        """Give what is said of some tokens alone: (M,) ids."""

    def expect(self, values: Tensor, tokens: Tensor) -> Tensor:
        """Give sum over `tokens` of values[x] p(x | z): (..., n) values, (n,) ids -> (..., h)."""

    def sample(self, states: Tensor, generator: torch.Generator | None) -> Tensor:
        """Draw a token for each state: (n,) -> (n,)."""

    def tensors(self) -> dict[str, Tensor]:
        """Give the parameters by name, to be saved."""

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Build it from what `tensors` gave."""

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> Self:
        """Move or convert it."""


class Part(NamedTuple):
    """p(x | z) of some tokens: a matrix, dense or CSR, and a background of rank one."""

    matrix: Tensor  # (M, h)
    background: Tensor  # (M,)
    leak: Tensor  # (h,)
    bounds: NDArray[np.int32] | None = None  # (M + 1,): offsets of a CSR matrix, on the host

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        held = self.matrix.values() if self.matrix.is_sparse_csr else self.matrix
        return 2 * held.nbytes if self.matrix.is_sparse_csr else held.nbytes

    def rows(self, block: slice) -> "Part":
        """Give the same of some of the tokens."""
        if block.start == 0 and block.stop == len(self.background):
            return self
        if self.bounds is None:
            return Part(self.matrix[block], self.background[block], self.leak)
        first, last = int(self.bounds[block.start]), int(self.bounds[block.stop])
        matrix = csr_rows(self.matrix, block, slice(first, last))
        bounds = self.bounds[block.start : block.stop + 1] - first
        return Part(matrix, self.background[block], self.leak, bounds)

    def predict(self, beliefs: Tensor) -> Tensor:
        """Give p(x) token-major, of beliefs as columns: (h, n) -> (M, n)."""
        columns = beliefs.to(self.matrix.dtype)
        entries, leaked = self.matrix @ columns, self.leak @ columns
        return entries.addcmul_(self.background[:, None], leaked).to(beliefs.dtype)


@dataclass(frozen=True, eq=False)
class DenseEmission:
    """p(x | z) as a (V, h) table: `table[x, z]`, columns sum to 1.

    Token-major, so that the row of one token, which is what filtering reads, is contiguous.
    """

    kind: ClassVar[str] = "dense"
    table: Tensor
    _normaliser: Tensor = field(init=False, repr=False)  # (h,): 1 / what each column sums to

    def __post_init__(self) -> None:
        totals = distribution_totals("emission", self.table, dim=0)
        normaliser = totals.reciprocal().to(working_dtype(self.table.dtype))
        object.__setattr__(self, "_normaliser", normaliser)

    @property
    def num_states(self) -> int:
        """h, the number of hidden states."""
        return self.table.shape[1]

    @property
    def vocab_size(self) -> int:
        """V, the number of tokens."""
        return self.table.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype that the table is stored in."""
        return self.table.dtype

    def rows(self, tokens: Tensor) -> Tensor:
        """Give p(x | z) of each token for all states: (...) ids -> (..., h)."""
        return self.table[tokens] * self._normaliser

    def predict(self, belief: Tensor) -> Tensor:
        """Give p(x) = sum_z belief[z] emission[x, z] for all tokens: (..., h) -> (..., V)."""
        return matmul(belief * self._normaliser, self.table.T)

    def predict_blocks(self, beliefs: Tensor, size: int) -> Iterator[tuple[slice, Tensor]]:
        """Give p(x) token-major, of beliefs as columns: (h, n) -> blocks, each (block, n)."""
        rows = (beliefs * self._normaliser[:, None]).T
        for block in blocks_of(self.vocab_size, size):
            yield block, matmul(rows, self.table[block].T).T

    def part(self, tokens: Tensor) -> Part:
        """Give what is said of some tokens alone: (M,) ids."""
        rows = self.rows(tokens)
        return Part(rows, rows.new_zeros(len(rows)), rows.new_zeros(self.num_states))

    def expect(self, values: Tensor, tokens: Tensor) -> Tensor:
        """Give sum over `tokens` of values[x] emission[x, z]: (..., n), (n,) -> (..., h)."""
        expected = values.new_zeros(*values.shape[:-1], self.num_states)
        step = max(1, CHUNK_ELEMENTS // self.num_states)
        for first in range(0, len(tokens), step):
            some = slice(first, first + step)
            expected += matmul(values[..., some], self.table[tokens[some]])
        return expected * self._normaliser

    def sample(self, states: Tensor, generator: torch.Generator | None) -> Tensor:
        """Draw a token for each state by inverting its cumulative distribution: (n,) -> (n,)."""
        uniform = uniforms(states, generator)
        tokens = torch.empty_like(states)
        distinct, owner = torch.unique(states, return_inverse=True)
        width = max(1, CHUNK_ELEMENTS // self.vocab_size)  # how many states at once
        for first in range(0, len(distinct), width):
            group = distinct[first : first + width]
            cumulative = self.table[:, group].T.to(torch.float64).cumsum(-1)  # (group, V)
            cumulative = cumulative / cumulative[:, -1:]  # a copy: it reads itself
            chosen = (owner >= first) & (owner < first + width)
            position = owner[chosen] - first
            # All states' curves as one: the curve of state i climbs from i to i + 1.
            curve = (cumulative + torch.arange(len(group), device=states.device)[:, None]).flatten()
            found = torch.searchsorted(curve, uniform[chosen] + position, right=True)
            tokens[chosen] = found - position * self.vocab_size
        return tokens

    def tensors(self) -> dict[str, Tensor]:
        """Give the parameters by name, to be saved."""
        return {"table": self.table}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Build it from what `tensors` gave."""
        return cls(tensors["table"])

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> Self:
        """Move or convert the table; tokens must not vanish in float16."""
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
    """Give some rows of a sparse matrix; `entries` are theirs, from the first to the last."""
    offsets = matrix.crow_indices()[block.start : block.stop + 1]
    columns, values = matrix.col_indices()[entries], matrix.values()[entries]
    return csr(offsets - offsets[0], columns, values, (len(offsets) - 1, matrix.shape[1]))


def csr(offsets: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """Make a sparse matrix, believed to be one; torch warns that it is new to this."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta", UserWarning)
        return torch.sparse_csr_tensor(offsets, columns, values, shape, check_invariants=False)


def uniforms(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw float64 numbers from [0, 1), a hair short of 1: adding an integer must not round up."""
    drawn = torch.rand(like.shape, dtype=torch.float64, device=like.device, generator=generator)
    return drawn * (1 - 2.0**-36)
