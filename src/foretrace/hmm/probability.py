"""Check, sum and multiply probability tables of any dtype without copying them.

A table that was rounded to bfloat16 no longer sums to 1. Every operator therefore stores the totals
of its table and divides by them in its products.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from foretrace.errors import InvalidModelError

TABLE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FEW_ROWS = 64  # up to this many, `transposed` uses a matrix product
RARE_END = 1e-3  # of the last state's emission, for each end of texts after the first
CHUNK_ELEMENTS = 1 << 20  # elements of a table to process at once: 4 MB of float32


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for beliefs and sums: float64 for float64 tables, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without the prefix, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def chunks(table: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Iterate over the rows of a (rows, columns) table, a few megabytes at a time."""
    step = max(1, CHUNK_ELEMENTS // max(1, table.shape[1]))
    for start in range(0, table.shape[0], step):
        rows = slice(start, min(start + step, table.shape[0]))
        yield rows, table[rows]


def matmul(values: Tensor, matrix: Tensor) -> Tensor:
    """Compute `values @ matrix` in the dtype of `values`.

    Products with a bfloat16 matrix run in bfloat16. A float16 matrix is converted a few megabytes
    at a time, because beliefs over thousands of states underflow in float16.
    """
    if values.dtype == matrix.dtype:
        return values @ matrix
    if matrix.dtype == torch.bfloat16:
        return (values.to(matrix.dtype) @ matrix).to(values.dtype)
    width = max(1, CHUNK_ELEMENTS // max(1, matrix.shape[0]))
    products = [values @ columns.to(values.dtype) for columns in torch.split(matrix, width, dim=1)]
    return torch.cat(products, dim=-1)


def converted(
    table: Tensor, normaliser: Tensor, device: torch.device | str | None, dtype: torch.dtype | None
) -> Tensor:
    """Return a table in another dtype or on another device.

    If the new dtype is more precise, the result is multiplied by `normaliser`, so that its
    distributions sum to 1 in the new dtype.
    """
    moved = table.to(device=device, dtype=dtype)
    if torch.finfo(moved.dtype).eps < torch.finfo(table.dtype).eps:
        moved.mul_(normaliser.to(moved))
    return moved


def require_table_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise unless probabilities can be stored in `dtype`."""
    if dtype not in TABLE_DTYPES:
        raise InvalidModelError(
            f"{name} cannot be {dtype_name(dtype)}: convert it to "
            f"{', '.join(map(dtype_name, TABLE_DTYPES))}."
        )


def distribution_totals(name: str, table: Tensor, *, dim: int) -> Tensor:
    """Sum a (rows, columns) table over `dim`, and raise unless it holds distributions along it.

    Returns the totals in float64. They may differ from 1 by rounding errors only.
    """
    require_table_dtype(name, table.dtype)
    if table.dim() != 2 or 0 in table.shape:
        raise InvalidModelError(
            f"{name} must be a non-empty table, but has the shape {tuple(table.shape)}."
        )
    totals = torch.zeros(table.shape[1 - dim], dtype=torch.float64, device=table.device)
    negative = torch.zeros((), dtype=torch.bool, device=table.device)
    for rows, chunk in chunks(table):
        sums = chunk.sum(dim, dtype=torch.float64)
        if dim == 0:
            totals += sums
        else:
            totals[rows] = sums
        negative |= (chunk < 0).any()
    tolerance = _rounding_error(table.dtype, table.shape[dim])
    _require_distributions(name, totals, bool(negative), tolerance)
    return totals


def _rounding_error(dtype: torch.dtype, size: int) -> float:
    """Return a bound on the rounding error of the sum of `size` probabilities in `dtype`."""
    limits = torch.finfo(dtype)
    return 1e-4 + limits.eps + size * limits.smallest_normal * limits.eps


def _require_distributions(name: str, totals: Tensor, negative: bool, tolerance: float) -> None:
    if not bool(totals.isfinite().all()):
        raise InvalidModelError(
            f"{name} holds NaN or infinity. Training may have diverged or been interrupted. "
            f"Make it again; foretrace never writes such a table."
        )
    if negative:
        raise InvalidModelError(
            f"{name} holds negative numbers, which are not probabilities. If it holds "
            f"logarithms, pass their exponentials."
        )
    error = (totals - 1).abs()
    if float(error.max()) > tolerance:
        worst = int(error.argmax())
        state = f" for state {worst}" if len(totals) > 1 else ""
        raise InvalidModelError(
            f"{name} does not sum to 1{state}: it sums to {float(totals[worst]):.6g}. Normalise "
            f"it, or check that it is not transposed."
        )


def blocks_of(total: int, size: int) -> Iterator[slice]:
    """Split range(total) into slices of at most `size` elements."""
    for first in range(0, total, size):
        yield slice(first, min(first + size, total))


def transposed(table: Tensor, *, by_product: bool) -> Tensor:
    """Transpose (V, n) to a contiguous (n, V), which sorting and softmax read row by row.

    On CPUs, for few rows, a product with the identity matrix is three times as fast as a copy. For
    more, torch transposes contiguous tables alone in blocks that fit the caches.
    """
    rows = table.shape[1]
    if by_product and rows <= FEW_ROWS:
        return torch.eye(rows, dtype=table.dtype, device=table.device) @ table.T
    return table.contiguous().T.contiguous()


def emit_only_ends_(emission: Tensor, ends: Sequence[int]) -> Tensor:
    """Let the last state emit the ends of texts and nothing else, and it alone: (V, h), in place.

    The first end is the usual one. Each other end has the probability RARE_END.
    """
    emission[list(ends)] = 0.0
    emission[:, -1] = 0.0
    emission[list(ends), -1] = RARE_END
    emission[ends[0], -1] = 1.0 - RARE_END * (len(ends) - 1)
    return emission
