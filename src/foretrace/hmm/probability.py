"""Tables of probabilities in any dtype: checked, summed and multiplied without a second copy.

A table rounded to bfloat16 no longer sums to 1. Every operator therefore keeps the totals of its
table and divides by them as it computes, so that what rounding did to a whole row is undone.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from foretrace.errors import InvalidModelError

TABLE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FEW_ROWS = 64  # whose table is turned by a product
CHUNK_ELEMENTS = 1 << 20  # how much of a table is widened at once: 4 MB of float32


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype for beliefs and sums over a table of `dtype`: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    """Name a dtype for people: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def chunks(table: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Walk over the rows of a (rows, columns) table a few megabytes at a time."""
    step = max(1, CHUNK_ELEMENTS // max(1, table.shape[1]))
    for start in range(0, table.shape[0], step):
        rows = slice(start, min(start + step, table.shape[0]))
        yield rows, table[rows]


def matmul(values: Tensor, matrix: Tensor) -> Tensor:
    """Multiply `values @ matrix`; the result has the values' dtype.

    bfloat16 products run as such, to bfloat16's precision. float16 is widened a few megabytes at a
    time: it cannot hold a belief that is spread over thousands of states.
    """
    if values.dtype == matrix.dtype:
        return values @ matrix
    if matrix.dtype == torch.bfloat16:
        return (values.to(matrix.dtype) @ matrix).to(values.dtype)
    width = max(1, CHUNK_ELEMENTS // max(1, matrix.shape[0]))
    parts = [values @ part.to(values.dtype) for part in torch.split(matrix, width, dim=1)]
    return torch.cat(parts, dim=-1)


def converted(
    table: Tensor, normaliser: Tensor, device: torch.device | str | None, dtype: torch.dtype | None
) -> Tensor:
    """Move or convert a table. A finer dtype can hold the normaliser: it is folded in."""
    moved = table.to(device=device, dtype=dtype)
    if torch.finfo(moved.dtype).eps < torch.finfo(table.dtype).eps:
        moved.mul_(normaliser.to(moved))
    return moved


def require_table_dtype(name: str, dtype: torch.dtype) -> None:
    """Insist on a dtype that probabilities can be stored in."""
    if dtype not in TABLE_DTYPES:
        raise InvalidModelError(
            f"{name} cannot be {dtype_name(dtype)}: convert it to "
            f"{', '.join(map(dtype_name, TABLE_DTYPES))}."
        )


def distribution_totals(name: str, table: Tensor, *, dim: int) -> Tensor:
    """Sum a (rows, columns) table over `dim`, and insist that it holds distributions along it.

    Returns the totals in float64; they differ from 1 by no more than rounding can explain.
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
    _require_distributions(name, totals, bool(negative), _slack(table.dtype, table.shape[dim]))
    return totals


def _slack(dtype: torch.dtype, size: int) -> float:
    """Bound how far from 1 rounding `size` probabilities to `dtype` can take their sum."""
    limits = torch.finfo(dtype)
    return 1e-4 + limits.eps + size * limits.smallest_normal * limits.eps


def _require_distributions(name: str, totals: Tensor, negative: bool, slack: float) -> None:
    if not bool(totals.isfinite().all()):
        raise InvalidModelError(
            f"{name} holds NaN or infinity. Was its training interrupted or did it diverge? "
            f"Make it again; foretrace never writes such a table."
        )
    if negative:
        raise InvalidModelError(
            f"{name} holds negative numbers, so it is not a table of probabilities. If it holds "
            f"logarithms, give their exponentials."
        )
    error = (totals - 1).abs()
    if float(error.max()) > slack:
        worst = int(error.argmax())
        whose = f" for state {worst}" if len(totals) > 1 else ""
        raise InvalidModelError(
            f"{name} does not sum to 1{whose}: it sums to {float(totals[worst]):.6g}. Normalise "
            f"it, or check that it is not transposed."
        )


def blocks_of(total: int, size: int) -> Iterator[slice]:
    """Cut a range into blocks."""
    for first in range(0, total, size):
        yield slice(first, min(first + size, total))


def transposed(table: Tensor) -> Tensor:
    """Turn (V, n) into (n, V), row-major: sorting and softmax read rows.

    Of few rows, a product with the identity makes it three times as fast as a copy, on CPUs.
    """
    rows = table.shape[1]
    if rows > FEW_ROWS or table.device.type != "cpu":
        return table.T.contiguous()
    return torch.eye(rows, dtype=table.dtype) @ table.T
